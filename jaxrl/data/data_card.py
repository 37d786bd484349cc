"""The data card: a summary of the data of a run on one screen.

data.train: dapo.parquet (Parquet, layout DAPO-Math-17k as published)
  1,724,312 rows, 17,243 prompts, 70.0% of what is drawn
  1,707,057 duplicates, left out
  12 rows without a truth, left out
    dapo.parquet row 17: field 'answer' is ""; it must be text and not empty
  tokens up to      64     128     256     512
  prompts        4,402   8,301   3,906     634
  shortest 18, median 95, longest 480, all 1,834,211
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from jaxrl.data.problems import Problems, Source
from jaxrl.data.prompt_encoding import EncodedPrompts

_FIRST_BIN = 64


def data_card(
    problems: Problems,
    train: Sequence[EncodedPrompts] = (),
    evaluation: Sequence[EncodedPrompts] = (),
    *,
    sampler: str = "",
) -> str:
    """The card as text, a paragraph for each source.

    Args:
      problems: The training and evaluation sources.
      train, evaluation: Their encoded prompts, one entry a source; () leaves out the lengths.
      sampler: `data.sampler`, which then decides the shares of the sources.
    """
    total = sum(source.settings.weight for source in problems.train)
    lines: list[str] = []
    for source, encoded in zip(problems.train, train or [None] * len(problems.train), strict=True):
        share = f", {source.settings.weight / total:.1%} of what is drawn"
        if sampler:
            share = f", drawn as {sampler} decides"
        lines += _paragraph(source, encoded, share if sampler or len(problems.train) > 1 else "")
    unknown = [None] * len(problems.evaluation)
    for source, encoded in zip(problems.evaluation, evaluation or unknown, strict=True):
        lines += _paragraph(source, encoded, "")
    return "\n".join(lines)


def histogram(lengths: np.ndarray) -> list[tuple[int, int]]:
    """(upper end, count) of bins that end at 64, 128, 256, ...; the first and the last bin are not empty."""
    # The logarithm of 0 is infinite, and empty prompts belong to the first bin anyway.
    ends = np.maximum(_FIRST_BIN, 2 ** np.ceil(np.log2(np.maximum(lengths, 1))).astype(int))
    bins: list[tuple[int, int]] = []
    end = int(ends.min())
    while end <= ends.max():
        bins.append((end, int((ends == end).sum())))
        end *= 2
    return bins


def _paragraph(source: Source, encoded: EncodedPrompts | None, share: str) -> Iterator[str]:
    prompts = len(source.records) if encoded is None else len(encoded.prompts)
    yield f"{source.name}: {source.origin}"
    yield f"  {source.num_rows:,} rows, {prompts:,} prompts{share}"
    names = source.source_names
    if len(names) > 1:
        counts = {name: sum(record.source == name for record in source.records) for name in names}
        yield f"  {', '.join(f'{name} {count:,}' for name, count in counts.items())}"
    # A name that the setting has already would be said twice.
    elif names and names[0] not in source.name:
        yield f"  metrics are kept under {names[0]!r}"
    for reason, dropped in source.dropped.items():
        yield f"  {dropped.count:,} {reason}, left out"
        yield from (
            f"    {message if len(message) <= 200 else f'{message[:197]}...'}"
            for message in dropped.named
        )
    if kept := sum(not record.answer for record in source.records):
        yield f"  {kept:,} prompts without a truth, which the grader does not look at; kept"
    if source.own_template:
        yield "  the file's own words around each problem stay, unless a template is set"
    if encoded is None:
        return
    lengths = encoded.lengths
    if dropped := len(lengths) - prompts:
        yield f"  {dropped:,} longer than data.max_prompt_tokens, left out"
    if encoded.num_cut:
        yield f"  {encoded.num_cut:,} longer than data.max_prompt_tokens, cut to it"
    bins = histogram(lengths)
    width = max(len(f"{max(bin)}") for bin in bins) + 3
    yield "  tokens up to" + "".join(f"{end:{width},}" for end, _ in bins)
    yield "  prompts     " + "".join(f"{count:{width},}" for _, count in bins)
    yield (
        f"  shortest {lengths.min():,}, median {int(np.median(lengths)):,}, longest {lengths.max():,}, "
        f"all {lengths.sum():,}"
    )
