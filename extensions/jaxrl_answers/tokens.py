r"""Removes the markup around an answer, and splits it into tokens: one token for all notations of a thing.

    "$x = 10,\!080\text{ cm}^2$."  ->  sym x, op =, num 10080, word cm, op ^, num 2

The content of `\text{...}` becomes words. Other letters become one variable each, except names of functions,
units after a number, "or" and "and". Outside brackets a comma between groups of three digits belongs to the
number, if `thousands` is set.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import tomllib
from collections.abc import Sequence

from jaxrl.rewards.markup import BOX, SCIENTIFIC, UNITS, closing_brace, without_spacing

# These bound the work of parsing and comparing.
MAX_CHARS = 2000
MAX_TOKENS = 800
MAX_DIGITS = 400


class Unreadable(Exception):
    """The parser cannot read the text, or can read it in several ways."""


@dataclasses.dataclass(frozen=True)
class Token:
    """A token of an answer.

    Attributes:
      kind: "num", "sym", "word", "cmd" or "op".
      text: text as written; commands have no backslash.
      spaced: whether there is space before the token.
    """

    kind: str
    text: str
    spaced: bool = False


_FOLDER = pathlib.Path(__file__).parent
_NOTATION = tomllib.loads((_FOLDER / "notation.toml").read_text("utf-8"))
_UNICODE: dict[str, str] = _NOTATION["characters"]
_SYNONYMS: dict[str, str] = _NOTATION["commands"]
_FOREIGN_WORDS: dict[str, str] = _NOTATION["foreign_words"]
SYMBOLS: dict[str, str] = _NOTATION["unit_symbols"]
UNIT_WORDS, FUNCTIONS, _GREEK = (
    frozenset(_NOTATION[name].split()) for name in ("unit_words", "functions", "greek")
)
_ASCII: dict[str, str] = {**{name: name for name in FUNCTIONS}, **_NOTATION["letters"]}

# Fonts say nothing about the value, so their content is read as the words of \text.
_TEXT_COMMANDS = (
    "text|textbf|textit|textrm|textsf|texttt|textnormal|mathrm|mathbf|mathit|mathsf|mathcal|mbox|hbox"
    "|operatorname|emph|bold|boldsymbol|mathop|rm|bf"
)
_TEXT_COMMAND = re.compile(rf"\\(?:{_TEXT_COMMANDS})\*?\s*\{{((?:[^{{}}]|[\^_]\{{[^{{}}]*\}})*)\}}")

# Marks around the content of \text{...}.
_OPEN, _CLOSE = "\x01", "\x02"

# Sizes and spacing of brackets, with no meaning.
_DRESS = (
    "left|right|mathopen|mathclose|middle|bigl?|bigr|Bigl?|Bigr|biggl?|biggr|displaystyle|textstyle|limits"
    "|hfill|strut"
)
# 10\u207b\u00b3 is 10^{-3}.
_RAISED = str.maketrans(
    "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207b", "0123456789-"
)
_RAISED_RUN = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207b]+")
# The index of a root: "³√8". After a digit or a letter it would be a power.
_RAISED_INDEX = re.compile("(?<![0-9A-Za-z)}\\]])([\u00b3\u2074-\u2079])\u221a")


_REWRITES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\{,\}(?=\s*[0-9])|,\\!\s*(?=[0-9])", "\x03"),  # always a separator of thousands
        (r"\\!\s*(?=:)|(?<=:)\s*\\!", ""),  # 8\!:\!30 is a time, and 8 : 30 a ratio
        # 1\,234 in three digits, since "1\, 2" may be two numbers.
        (r"(?<=[0-9])\\[,;:!]\s*(?=[0-9]{3}(?![0-9]))", "\x03"),
        (r"\\math(?:open|close)\s*\{\s*([][()])\s*\}", r"\1"),
        # "in" is inches after a number, if nothing but a power follows.
        (
            r"(?<=[0-9i])(\s*\\(?:text|mathrm)\s*\{\s*(?:sq\w*\.?\s+)?|\s+)in\.?"
            r"(?=\s*\}?\s*(?:\^\s*\{?[23]\}?)?\s*\Z)",
            r"\1inch",
        ),
        # "\left." is a bracket that is not seen, so its full stop goes too.
        (rf"\\(?:{_DRESS})(?![A-Za-z])\.?", " "),
        (r"\\(?:q?quad|enspace|thinspace|hspace\s*\{[^{}]*\})(?![A-Za-z])", " "),
        # "~" is a space of TeX after a word, and "about" before a number.
        (r"\\[,;:! ]|\\~|(?<=[A-Za-z0-9}.,])~|\\/", " "),
        (r"\\[()\[\]]", " "),
        # Without the command the braces of a box are a group.
        (r"\\(?:boxed|fbox)(?![A-Za-z])", " "),
        (r"\\mathbb\s*\{?\s*R\s*\}?", r"\\reals "),
        # Before the degree sign, which has several commands of its own.
        (r"\\([A-Za-z]+)(?![A-Za-z])", lambda command: _SYNONYMS.get(command[1]) or command[0]),
        # 30\degree, 30^\circ and 30^{\circ}
        (r"\\degree(?![A-Za-z])|\^\s*\\circ(?![A-Za-z])|\^\s*\{\s*\\circ\s*\}", r"\\degree "),
        # Signs as they are typed in programs.
        (r"<=", r"\\le "),
        (r">=", r"\\ge "),
        (r"!=|\\not\s*=", r"\\ne "),
        (r"\*\*", "^"),
        (
            r"(?<=[0-9])\s*(?:[xX\u0445\u0425]|\\(?:text|mathrm)\s*\{\s*[xX]\s*\})\s*(?=10\s*\^)",
            "*",
        ),  # 3 x 10^5
        # These move the index of a root by some points.
        (r"\\(?:leftroot|uproot)\s*\{[^{}]*\}", ""),
        # \root 3 \of 8, plain TeX
        (r"\\root\s*\{?([0-9a-z]+)\}?\s*\\of(?![A-Za-z])", r"\\sqrt[\1]"),
        (r"(?<![A-Za-z\\])cbrt(?![A-Za-z])", r"\\sqrt[3]"),
        (
            # f^{\prime\prime} is f''
            r"\^\s*\{\s*((?:\\prime\s*)+)\}|\^\s*(\\prime(?![A-Za-z]))",
            lambda primes: "'" * primes[0].count("prime"),
        ),
        (r"(?<=[0-9'])\s*\"", "''"),
        (r"\^\s*\{\s*('+)\s*\}", r"\1"),
        (r"\.\.\.|\u2026", r"\\dots "),
    )
)

WORDS = frozenset(("or", "and", "in", "not"))

# Chinese writes "square metre" and "per second" without a space.
_FOREIGN_PART = re.compile("(平方|立方|每)")
# A quotient of units outside \\text: "60 km/h", "9.8 m/s^2", "5 \\frac{m}{s}".
_LETTERS = r"[A-Za-z]{1,7}\.?(?:\^\{?-?[1-4]\}?)?"
_PLAIN_UNIT = re.compile(
    rf"(?<=[0-9}}])(?P<gap>\s*)(?P<unit>\\frac\s*\{{{_LETTERS}\}}\s*\{{{_LETTERS}\}}"
    rf"|{_LETTERS}(?:\s*[/*]\s*{_LETTERS})+)(?![A-Za-z0-9(^])"
)
# After a degree sign a letter is a scale of temperature.
_SCALES = {"c": "celsius", "celsius": "celsius", "f": "fahrenheit", "fahrenheit": "fahrenheit"}
# Of plain TeX, where the operator stands between its operands.
_INFIX = {"over": "frac", "choose": "binom"}

_TOKEN = re.compile(
    rf"(?P<num>{SCIENTIFIC}|[0-9]+(?:\x03[0-9]{{3}})*(?:\.[0-9]+)?|\.[0-9]+)"
    r"|\\(?P<cmd>[A-Za-z]+|[{}%$&#_|\\])"
    r"|(?P<letters>[A-Za-z]+)"
    r"|(?P<foreign>[\u0400-\u04ff\u3005\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af]+)"
    r"|(?P<op>[-+*/^_!=<>()\[\]{},;:|&%'?.])"
    r"|(?P<space>[\s$\x01\x02]+)"
)
# Not in an index or an exponent, and no more digits after it: "1,2345" is two numbers.
_THOUSANDS = re.compile(r"(?<![0-9A-Za-z,.\\_^])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?!,[0-9])")
# Thousands with spaces, as in "1 234 567".
_SPACED = re.compile(r"(?<![0-9A-Za-z,.\\_^])[0-9]{1,3}(?: [0-9]{3})+(?![0-9])(?! [0-9])")
_DEPTH = re.compile(r"\\\{|\\\}|[()\[\]]")


def tokens_of(text: str, *, thousands: bool = True) -> list[Token]:
    """Returns the tokens of an answer.

    Args:
      text: answer of at most `MAX_CHARS` characters.
      thousands: whether a comma may separate thousands.

    Raises:
      Unreadable: The text is too long or contains an unknown character.
    """
    if len(text) > MAX_CHARS:
        raise Unreadable("too long")
    text = _clean(text, thousands=thousands)
    tokens: list[Token] = []
    words = spaced = False
    place = 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise Unreadable(f"{text[place]!r} has no meaning here")
        place = match.end()
        kind, found = match.lastgroup, match[0]
        if kind == "space":
            # In their order: behind the end of one \text another may begin.
            for sign in found:
                words = sign == _OPEN or (words and sign != _CLOSE)
            spaced = True
            continue
        if kind == "letters":
            tokens += _of_letters(found, words, spaced, tokens)
        elif kind == "foreign":
            parts = [part for part in _FOREIGN_PART.split(found) if part]
            for word in (_FOREIGN_WORDS.get(part, part) for part in parts):
                tokens.append(Token("cmd" if word == "degree" else "word", word, spaced))
        elif kind == "num":
            if len(found) > MAX_DIGITS:
                raise Unreadable("a number is too long")
            tokens.append(Token("num", found.replace("\x03", ""), spaced))
        elif kind == "cmd":
            name = match["cmd"]
            greek = "sym" if name in _GREEK else "cmd"
            tokens.append(Token(greek, name, spaced))
        else:
            tokens.append(Token("op", found, spaced))
        spaced = False
        if len(tokens) > MAX_TOKENS:
            raise Unreadable("too many parts")
    return _with_half_open(_with_fractions(tokens))


def _with_fractions(tokens: list[Token]) -> list[Token]:
    """Rewrites "{a \\over b}" to "\\frac{a}{b}", and "{a \\choose b}" to "\\binom{a}{b}"."""
    for _ in range(sum(t.kind == "cmd" and t.text in _INFIX for t in tokens)):
        place = next(n for n, t in enumerate(tokens) if t.kind == "cmd" and t.text in _INFIX)
        start = _end_of_operand(tokens, place - 1, -1)
        end = _end_of_operand(tokens, place + 1, 1)
        above, below = tokens[start + 1 : place], tokens[place + 1 : end]
        if not above or not below:
            raise Unreadable(f"\\{tokens[place].text} in this place")
        left, right = Token("op", "{"), Token("op", "}")
        name = Token("cmd", _INFIX[tokens[place].text])
        fraction = [name, left, *above, right, left, *below, right]
        braced = start >= 0 and end < len(tokens) and is_op(tokens[start], "{")
        tokens[start + (not braced) : end + braced] = fraction
    return tokens


def _end_of_operand(tokens: Sequence[Token], place: int, step: int) -> int:
    """Returns the place of the bracket, comma or relation that ends an operand; one too far without."""
    depth = 0
    while 0 <= place < len(tokens):
        token = tokens[place]
        opens = (token.text in "([{") - (token.text in ")]}") if token.kind == "op" else 0
        depth += opens * step
        if depth < 0 or (depth == 0 and is_op(token, ",", ";", "=", "<", ">")):
            return place
        if depth == 0 and step > 0 and token.text in _INFIX:
            raise Unreadable("two fractions in one pair of braces")
        place += step
    return place


def _with_half_open(tokens: list[Token]) -> list[Token]:
    """Rewrites "[0; 1[" to "[0; 1)" and "]0, 1]" to "(0, 1]"."""
    tokens = list(tokens)
    for n, token in enumerate(tokens):
        before = tokens[n - 1] if n else None
        # Only where an interval can begin, so that brackets of expressions stay.
        if not is_op(token, "[", "]", "(") or not (
            before is None
            or (before.kind == "cmd" and before.text in ("cup", "setminus", "in", "{"))
            or is_op(before, "=", ",", ";", ":")
            or before.kind == "word"
        ):
            continue
        depth, separators, end = 0, [], None
        for m in range(n + 1, len(tokens)):
            if depth == 0 and is_op(tokens[m], "[", "]", ")"):
                end = m
                break
            if is_op(tokens[m], "(", "{", ")", "}"):
                depth += 1 if tokens[m].text in "({" else -1
            elif depth == 0 and is_op(tokens[m], ",", ";"):
                separators.append(m)
        if end is None or len(separators) != 1 or not n + 1 < separators[0] < end - 1:
            continue
        if token.text == "]" or tokens[end].text == "[":
            tokens[n] = dataclasses.replace(token, text="(" if token.text == "]" else token.text)
            closing = ")" if tokens[end].text == "[" else tokens[end].text
            tokens[end] = dataclasses.replace(tokens[end], text=closing)
    return tokens


def _clean(text: str, *, thousands: bool) -> str:
    # The index of a root first: as a power it would belong to what is before it.
    text = _RAISED_INDEX.sub(lambda m: rf"\sqrt[{m[1].translate(_RAISED)}]", text)
    text = _RAISED_RUN.sub(lambda m: f"^{{{m[0].translate(_RAISED)}}}", text)
    text = text.translate(str.maketrans(_UNICODE))
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    # Commands may stand in each other; each round takes off the innermost.
    while True:
        unwrapped = _TEXT_COMMAND.sub(rf"{_OPEN}\1{_CLOSE}", text)
        if unwrapped == text:
            break
        text = unwrapped
    text = _PLAIN_UNIT.sub(_as_words, text)
    if thousands:
        for pattern in (_THOUSANDS, _SPACED):
            before = text
            text = pattern.sub(lambda m, whole=before: _joined(m, whole), before)
    return text


def _as_words(match: re.Match[str]) -> str:
    """Marks a quotient of units as words; letters right after a number may be variables: "2m/s"."""
    names = re.findall(r"[A-Za-z]+", match["unit"].replace(r"\frac", ""))
    units = all(name in SYMBOLS or name.lower() in UNITS for name in names)
    quotient = "/" in match["unit"] or "frac" in match["unit"] or "-" in match["unit"]
    spaced = match["gap"] or len(names[0]) > 1
    return f" {_OPEN}{match['unit']}{_CLOSE}" if units and quotient and spaced else match[0]


def _joined(match: re.Match[str], text: str) -> str:
    """Removes the commas of a number; keeps them inside brackets, where they separate items."""
    depth = 0
    for bracket in _DEPTH.finditer(text, 0, match.start()):
        depth += 1 if bracket[0] in (r"\{", "(", "[") else -1
    return match[0] if depth else re.sub("[ ,]", "", match[0])


def _of_letters(letters: str, words: bool, spaced: bool, before: list[Token]) -> list[Token]:
    """Returns one token per variable, or one for a word or a function."""
    lower = letters.lower()
    if before and before[-1].text == "degree" and lower in _SCALES:
        return [Token("word", _SCALES[lower], spaced)]
    # "5 cm" is a unit, "x cm" three variables, and "5 * cm" a product.
    after_number = bool(before) and before[-1].text not in ("*", "/", "+", "-", "=", "^", "_")
    if words:
        if lower in ("degree", "degrees"):
            return [Token("cmd", "degree", spaced)]
        if lower == "percent":
            return [Token("op", "%", spaced)]
        return [Token("word", letters, spaced)]
    if letters in _ASCII and (letters != "U" or spaced):
        name = _ASCII[letters]
        kind = "op" if name == "%" else "sym" if name in _GREEK else "cmd"
        return [Token(kind, name, spaced)]
    if lower in WORDS or (after_number and (lower in UNITS or lower in UNIT_WORDS)):
        return [Token("word", letters, spaced)]
    return [Token("sym", letter, spaced and n == 0) for n, letter in enumerate(letters)]


def is_op(token: Token, *texts: str) -> bool:
    """Returns whether a token is one of these operators."""
    return token.kind == "op" and token.text in texts


# Markup around an answer: Markdown, dollars, boxes


def undressed(text: str) -> str:
    """Returns an answer without Markdown, dollars, box and full stop around it."""
    while True:
        before = text
        text = without_spacing(without_spacing(text).strip("`"))
        if text.startswith("**") and text.endswith("**") and len(text) > 4:
            text = text[2:-2]
        text = re.sub(r"\A\*\*\s+|\s+\*\*\Z", "", text)
        # A dollar that no other closes is money.
        text = re.sub(r"\A([-+]?)\s*\$(?=[-+\d.,]+\Z)", r"\1\\$", text)
        text = re.sub(r"(?<![.\\])[.,;:\u3002]\s*\Z", "", text)
        for opening, closing in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
            if (
                text.startswith(opening)
                and text.endswith(closing)
                and len(text) > len(opening + closing)
                and opening not in text[len(opening) : -len(closing)]
                and not text.endswith(r"\$")
            ):
                text = text[len(opening) : -len(closing)]
        box = BOX.match(text)
        if box and text.endswith("}") and closing_brace(text, box.end()) == len(text) - 1:
            text = text[box.end() : -1]
        if text == before:
            return text


def spelled(text: str) -> str:
    """Returns one text for all answers that differ in markup only; empty if there is only markup."""
    text = undressed(text)
    if len(text) > MAX_CHARS:
        return " ".join(text.split())
    try:
        tokens = tokens_of(text)
    except Unreadable:
        return " ".join(text.split())
    out: list[str] = []
    for n, token in enumerate(tokens):
        # Braces around a single token have no meaning.
        if is_op(token, "{") and any(is_op(t, "}") for t in tokens[n + 2 : n + 3]):
            continue
        if is_op(token, "}") and n >= 2 and is_op(tokens[n - 2], "{"):
            continue
        lower = token.kind == "word" and token.text not in SYMBOLS
        out.append(token.text.lower() if lower else token.text)
    return " ".join(out)
