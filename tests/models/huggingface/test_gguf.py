"""GGUF files of every covered architecture and tokenizer, against Transformers and SentencePiece."""

import functools
import inspect
import json
import pathlib

import gguf
import numpy as np
import pytest
from extras import import_extra
from safetensors.numpy import load_file
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.errors import UserError
from jaxrl.models.huggingface.config_json import read_config
from jaxrl.models.huggingface.gguf_file import gguf_to_hf

torch = import_extra("parity", "torch")
transformers = import_extra("parity", "transformers")
from transformers.convert_slow_tokenizer import TikTokenConverter  # noqa: E402

SIZES = dict(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
)
# The middle wavelengths of heads of 16 at this base are those that Llama 3.1 divides in part.
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=500_000.0,
    factor=32.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=8192,
)
PLAIN = dict(rope_type="default", rope_theta=1e6)
GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
FAMILIES = {
    "llama": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3, rms_norm_eps=1e-5),
    "mistral": lambda: transformers.MistralConfig(
        **SIZES, head_dim=32, rope_parameters=PLAIN, sliding_window=None
    ),
    "qwen2": lambda: transformers.Qwen2Config(
        **SIZES, rope_parameters=PLAIN, tie_word_embeddings=True
    ),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=32, rope_parameters=PLAIN),
    "qwen3moe": lambda: transformers.Qwen3MoeConfig(
        **SIZES,
        head_dim=32,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        rope_parameters=PLAIN,
    ),
    "gemma2": lambda: transformers.Gemma2Config(
        **SIZES,
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=10,
        rope_parameters=PLAIN | {"rope_theta": 1e4},
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **SIZES | {"num_hidden_layers": 7},
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=10,
        sliding_window_pattern=6,
        rope_parameters=GEMMA3_ROPE,
    ),
}
ARCHITECTURE = {"mistral": "llama"}
TEXT = (
    pathlib.Path(__file__).parents[3] / "docs/rollout.md"
).read_text() + "Der Fluß fließt nach Süden. 東京は大きい。 ١٢٣ I'Ll\r\n\n\tx"
TEXTS = [
    "The children's 12345 apples, it's HTTPServer2024!!\n\n  two   spaces \n",
    "Der Fluß fließt nach Süden. 東京は大きい。 ¿Qué hora es? cafe\u0301",
    "<|im_start|>user\n<tool_call>Hi<|im_end|>\n",
    " x\t\ty\r\n\r\n😀 don't DON'T   ",
]


def make_model(family: str, folder: pathlib.Path):
    """A model of Transformers with random weights, saved in `folder`."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        FAMILIES[family](), attn_implementation="eager"
    )
    model = model.float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Norm scales and biases too, or a forgotten one could not be seen.
            scale = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.3
            centre = float(parameter.ndim == 1 and "gemma" not in family)
            parameter.copy_(centre + scale * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def interleaved(values, num_heads):
    """Rows of q or k as llama.cpp has them for Llama: the two halves of a head in turns."""
    shape = (num_heads, 2, values.shape[0] // num_heads // 2, values.shape[1])
    return values.reshape(shape).swapaxes(1, 2).reshape(values.shape)


def add_tensors(writer, architecture, folder, config):
    kind = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    experts = {}
    for name, values in load_file(folder / "model.safetensors").items():
        if "gemma" in architecture and name.endswith("norm.weight"):
            values = values + 1
        if architecture == "llama" and "q_proj" in name:
            values = interleaved(values, config.num_attention_heads)
        if architecture == "llama" and "k_proj" in name:
            values = interleaved(values, config.num_key_value_heads)
        if ".experts." in name:
            before, _, after = name.partition(".experts.")
            number, _, rest = after.partition(".")
            experts.setdefault(f"{before}.experts.{rest}", {})[int(number)] = values
            continue
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), values)
    for name, stack in experts.items():
        values = np.stack([stack[i] for i in sorted(stack)])
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), values)


def llama3_divisors(head_dim):
    """The divisors of the rotary frequencies, one by one as in Llama's published code."""
    divisors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * LLAMA3["rope_theta"] ** (i / head_dim)
        turns = LLAMA3["original_max_position_embeddings"] / wavelength
        if turns > 4:
            divisors.append(1.0)
        elif turns < 1:
            divisors.append(LLAMA3["factor"])
        else:
            smooth = (turns - 1) / 3
            divisors.append(1 / ((1 - smooth) / LLAMA3["factor"] + smooth))
    return np.array(divisors, np.float32)


def add_byte_tokens(writer, size):
    """Some byte-level tokenizer, for files whose model is looked at."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[: size - 2]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["<eos>", *letters, "!!"])
    writer.add_token_types([3] + [1] * (len(letters) + 1))
    writer.add_token_merges(["! !"])
    writer.add_eos_token_id(0)


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_model(path, family, folder, *, change=lambda writer: None):
    """The model in `folder` as llama.cpp's converter writes it."""
    config = transformers.AutoConfig.from_pretrained(folder)
    architecture = ARCHITECTURE.get(family, family)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if family != "gemma2":  # which has the base in llama.cpp's code
        writer.add_rope_freq_base(500_000.0 if family == "llama" else 1e6)
    head_dim = getattr(config, "head_dim", None) or 16
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if family == "llama":
        writer.add_rope_dimension_count(head_dim)
        writer.add_tensor("rope_freqs.weight", llama3_divisors(head_dim))
    if family == "qwen3moe":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if "gemma" in family:
        writer.add_sliding_window(config.sliding_window)
    if family == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if family == "gemma3":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)
    add_byte_tokens(writer, config.vocab_size)
    add_tensors(writer, architecture, folder, config)
    change(writer)
    finish(writer)


def logits(model):
    # Longer than the windows.
    tokens = torch.from_numpy(np.random.default_rng(0).integers(64, size=(2, 40)))
    with torch.no_grad():
        return model(tokens).logits.numpy()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_converted_model_is_the_one_that_was_written(tmp_path, family):
    original = tmp_path / "original"
    model = make_model(family, original)
    write_model(tmp_path / "tiny.gguf", family, original)
    gguf_to_hf(tmp_path / "tiny.gguf", tmp_path / "hf")
    expected, found = read_config(original), read_config(tmp_path / "hf")
    assert found == expected
    tensors, theirs = (
        load_file(tmp_path / "hf/model.safetensors"),
        load_file(original / "model.safetensors"),
    )
    assert tensors.keys() == theirs.keys()
    for name, values in theirs.items():
        np.testing.assert_allclose(tensors[name], values, rtol=0, atol=2e-7, err_msg=name)
    again = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.float32, attn_implementation="eager"
    )
    np.testing.assert_allclose(logits(again.eval()), logits(model), rtol=0, atol=2e-5)


# Transformers takes no size of heads from files of the others.
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2"])
def test_transformers_reads_the_same_weights_from_the_file(tmp_path, family):
    original = tmp_path / "original"
    make_model(family, original)
    write_model(tmp_path / "tiny.gguf", family, original)
    gguf_to_hf(tmp_path / "tiny.gguf", tmp_path / "hf")
    read = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="tiny.gguf", dtype=torch.float32
    ).state_dict()
    for name, values in load_file(tmp_path / "hf/model.safetensors").items():
        np.testing.assert_allclose(values, read[name].numpy(), rtol=0, atol=2e-7, err_msg=name)


def sliding_pattern(writer):
    writer.add_array("gemma3.attention.sliding_window_pattern", [True, False] * 3 + [True])
    writer.add_float32("gemma3.rope.freq_base_swa", 5000.0)


def test_windows_of_a_file_that_names_them(tmp_path):
    make_model("gemma3", tmp_path / "original")
    write_model(tmp_path / "tiny.gguf", "gemma3", tmp_path / "original", change=sliding_pattern)
    gguf_to_hf(tmp_path / "tiny.gguf", tmp_path / "hf")
    config = read_config(tmp_path / "hf")
    assert config.sliding_layers == (True, False, True, False, True, False, True)
    assert config.rope_local_theta == 5000.0


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        (
            "qwen2",
            lambda w: w.add_tensor("blk.0.attn_q_norm.weight", np.ones(16, np.float32)),
            r"has the tensor blk\.0\.attn_q_norm\.weight, which Qwen2ForCausalLM does not have",
        ),
        (
            "qwen2",
            lambda w: w.add_tensor("rope_freqs.weight", np.full(8, 2, np.float32)),
            r"rotary scaling is not that of Llama 3\.1",
        ),
        (
            "qwen2",
            lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN),
            r"rope\.scaling\.type 'yarn', and only 'linear' is read",
        ),
        (
            "qwen2",
            lambda w: w.add_rope_dimension_count(8),
            r"rope\.dimension_count 8, and its heads",
        ),
        ("qwen2", lambda w: w.add_uint16("split.count", 3), "one of 3 files of a model"),
    ],
)
def test_what_a_model_lacks_is_refused(tmp_path, family, change, message):
    make_model(family, tmp_path / "original")
    write_model(tmp_path / "tiny.gguf", family, tmp_path / "original", change=change)
    with pytest.raises(UserError, match=message):
        gguf_to_hf(tmp_path / "tiny.gguf", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


@functools.cache
def trained():
    """Vocabulary and merges of a byte-level BPE tokenizer that may have merged numbers and several words."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split("\n", "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1500, show_progress=False, initial_alphabet=alphabet)
    backend.train_from_iterator(TEXT.split(), trainer)
    model = json.loads(backend.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


def write_tokens(path, pre, *, change=lambda writer: None):
    """A GGUF file with the trained tokenizer and a tiny model."""
    vocab, merges = trained()
    tokens = [*vocab, "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "[PAD1504]"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(vocab) + [3, 3, 3, 4, 5])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_eos_token_id(len(vocab))
    writer.add_bos_token_id(len(vocab))
    write_tiny_llama(writer, len(tokens), change)
    return len(vocab)


def write_tiny_llama(writer, num_tokens, change):
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(8)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    shapes = {"token_embd": (num_tokens, 8), "output_norm": (8,)}
    shapes |= {f"blk.0.{name}_norm": (8,) for name in ("attn", "ffn")}
    matrices = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    shapes |= {f"blk.0.{name}": (8, 8) for name in matrices}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
    change(writer)
    finish(writer)


def converted(folder, pre, **kwargs):
    write_tokens(folder / "tokens.gguf", pre, **kwargs)
    gguf_to_hf(folder / "tokens.gguf", folder / "hf")
    return load_tokenizer(folder / "hf")


def test_tokens_of_qwen_are_those_of_transformers(tmp_path):
    vocab, merges = trained()
    ours = converted(tmp_path, "qwen2")
    theirs = transformers.Qwen2Tokenizer(vocab=vocab, merges=merges)
    theirs.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    theirs.add_tokens(["<tool_call>"])
    for text in [*TEXTS, TEXT]:
        assert ours.encode(text).tolist() == theirs.encode(text, add_special_tokens=False)
    assert ours.decode(ours.encode(TEXTS[2])) == "user\n<tool_call>Hi\n"


def test_tokens_of_gpt2_are_those_of_transformers(tmp_path):
    vocab, merges = trained()
    ours = converted(tmp_path, "gpt-2")
    theirs = transformers.GPT2Tokenizer(vocab=vocab, merges=merges)
    theirs.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    theirs.add_tokens(["<tool_call>"])
    for text in [*TEXTS, TEXT]:
        assert ours.encode(text).tolist() == theirs.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    ("pre", "parts"),
    [
        ("llama-bpe", "I|'LL|Ġbuy|Ġ|ĠfooBAR|Ġ|202|4|!!ĊĊ|Ġa|/Ċ|Xy"),
        ("qwen2", "I|'LL|Ġbuy|Ġ|ĠfooBAR|Ġ|2|0|2|4|!!ĊĊ|Ġa|/Ċ|Xy"),
        ("tekken", "I|'LL|Ġbuy|Ġ|Ġfoo|BAR|Ġ|2|0|2|4|!!ĊĊ|Ġa|/Ċ|Xy"),
        ("smollm", "I|'|LL|Ġbuy|Ġ|ĠfooBAR|Ġ|2|0|2|4|!!|ĊĊ|Ġa|/|Ċ|Xy"),
        ("gpt-2", "I|'|LL|Ġbuy|Ġ|ĠfooBAR|Ġ2024|!!|ĊĊ|Ġa|/|Ċ|Xy"),
    ],
)
def test_a_text_is_split_as_the_name_says(tmp_path, pre, parts):
    split = converted(tmp_path, pre).backend.pre_tokenizer.pre_tokenize_str
    assert [part for part, _ in split("I'LL buy  fooBAR 2024!!\n\n a/\nXy")] == parts.split("|")


def test_the_split_of_llama_3_is_that_of_transformers(tmp_path):
    # The default of the converter of tiktoken's files, which Llama 3 has.
    theirs = inspect.signature(TikTokenConverter).parameters["pattern"].default
    split = json.loads(converted(tmp_path, "llama-bpe").backend.to_str())["pre_tokenizer"]
    assert split["pretokenizers"][0]["pattern"]["Regex"] == theirs


def test_a_part_that_is_a_token_needs_no_merges(tmp_path):
    # "Ġlonely" is a token without a merge that leads to it.
    def change(writer):
        writer.kv_data[0]["tokenizer.ggml.tokens"].value[-2] = "Ġlonely"
        writer.kv_data[0]["tokenizer.ggml.token_type"].value[-2] = 1

    lonely = len(trained()[0]) + 3
    for pre, alone in (("llama-bpe", True), ("gpt-2", False)):
        (tmp_path / pre).mkdir()
        ids = converted(tmp_path / pre, pre, change=change).encode("so lonely")
        assert (lonely in ids) == alone


def test_special_tokens_ends_and_padding(tmp_path):
    eos = len(trained()[0])
    tokenizer = converted(tmp_path, "llama-bpe")
    assert tokenizer.stop_ids == (
        eos,
        eos + 2,
    )  # <|im_end|>, which the file does not name as an end
    assert tokenizer.vocab_size == eos + 4  # [PAD1504] is a row of the embedding and no token
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    # Llama 3 begins with bos; the file does not say so.
    assert theirs.encode("x")[0] == eos == theirs.bos_token_id
    assert theirs.decode(theirs.encode("a <|im_end|>b"), skip_special_tokens=True) == "a b"


def write_pieces(path, model, *, prefix):
    """A GGUF file with the pieces of a SentencePiece model."""
    pieces = range(model.get_piece_size())
    kinds = [
        2 if model.is_unknown(i)
        else 3 if model.is_control(i)
        else 6 if model.is_byte(i)
        else 1
        for i in pieces
    ]  # fmt: skip
    texts = [model.id_to_piece(i) for i in pieces]
    for i, text in enumerate(texts):
        if text in USER_DEFINED:
            # llama.cpp's converter writes them as they are in a text.
            kinds[i], texts[i] = 4, text.replace("▁", " ")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(texts)
    writer.add_token_scores([model.get_score(i) for i in pieces])
    writer.add_token_types(kinds)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_space_prefix(prefix)
    write_tiny_llama(writer, len(texts), lambda writer: None)


USER_DEFINED = ["▁▁", "▁▁▁", "<td>", "\t\t"]


@pytest.mark.parametrize("prefix", [True, False])
def test_tokens_of_sentencepiece(tmp_path, prefix):
    sentencepiece = import_extra("parity", "sentencepiece")
    (tmp_path / "text").write_text(TEXT)
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"),
        model_prefix=str(tmp_path / "pieces"),
        model_type="bpe",
        vocab_size=900,
        character_coverage=0.98,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefix,
        # With a prefix, llama.cpp and Transformers add a space after each of these, SentencePiece does not.
        user_defined_symbols=[] if prefix else USER_DEFINED,
        minloglevel=2,
    )
    model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "pieces.model"))
    write_pieces(tmp_path / "tokens.gguf", model, prefix=prefix)
    gguf_to_hf(tmp_path / "tokens.gguf", tmp_path / "hf")
    ours = load_tokenizer(tmp_path / "hf")
    for text in ("a <b> 東京 😀", "x   = 12345    # y", "def f(x):\n\treturn {}", TEXT):
        assert ours.encode(text).tolist() == model.encode(text)
        assert ours.decode(ours.encode(text)) == text
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "hf").encode("a")[0] == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("pre", "bert-bge"), r"tokenizer\.ggml\.pre 'bert-bge', and only gpt-2, llama-bpe, "),
        (("model", "t5"), r"tokenizer\.ggml\.model 't5', and only gpt2, llama are read"),
        (("eos_token_id", 10**6), r"eos_token_id is 1000000, and ids go from 0 to"),
        (("tokens", "a"), r"tokenizer\.ggml\.tokens is 'a'; it must be a list of str"),
        (("token_type", [1]), r"tokens and 1 types of tokens"),
        (("merges", ["no merge"]), r"merges that do not fit its tokens"),
    ],
)
def test_what_a_tokenizer_lacks_is_refused(tmp_path, change, message):
    name, value = change

    def write(writer):
        kinds = {str: gguf.GGUFValueType.STRING, int: gguf.GGUFValueType.UINT32}
        kind = kinds.get(type(value), gguf.GGUFValueType.ARRAY)
        element = kinds[type(value[0])] if isinstance(value, list) else None
        writer.kv_data[0][f"tokenizer.ggml.{name}"] = gguf.GGUFValue(value, kind, element)

    write_tokens(tmp_path / "tokens.gguf", "qwen2", change=write)
    with pytest.raises(UserError, match=message):
        gguf_to_hf(tmp_path / "tokens.gguf", tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
