"""`minillm doctor`: checks of machines that are described and not at hand, and facts gathered in folders made for it."""

import io
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from minillm import doctor
from minillm.cli import main
from minillm.doctor import checks, gpu_checks, machine
from minillm.doctor.finding import Finding
from minillm.doctor.machine import Machine, Processor
from minillm.model import Transformer
from minillm.stages import STAGES

GB = 10**9
LAPTOP = Machine(
    system="linux", python=(3, 12, 3), executable="/home/ada/.venv/bin/python", in_environment=True,
    torch="2.13.0+cpu", cuda_build=None, cuda_archs=(), nvidia_card=False, driver=None, driver_cuda=None,
    visible_devices=None, apple_gpu=False, cpu=Processor("cpu", "AMD Ryzen", (0, 0), 12 * GB, "fp32"), gpus=(),
    cores=8, allotted=8, threads=8, load=0.4, notebook_packages=(), kernel="/home/ada/.venv/bin/python3",
    compiler="/usr/bin/g++", python_headers=True, triton=None, model=Path("/home/ada/.cache/minillm/model.gguf"),
    model_found=True, model_intact=True, folder=Path("/home/ada/.cache/minillm"), folder_writable=True, disk_free=90 * GB,
)  # fmt: skip
ARCHS = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")  # of a build for CUDA 13
T4 = Processor(
    "cuda:0",
    "Tesla T4",
    (7, 5),
    int(14.5 * GB),
    "fp16",
    {"quantization": "It needs 8.0.", "speculative": "It needs 8.0."},
)
A100 = Processor("cuda:0", "NVIDIA A100-SXM4-80GB", (8, 0), 80 * GB, "bf16")
CARD = replace(
    LAPTOP, nvidia_card=True, driver="580.65.06", driver_cuda=(13, 0), torch="2.13.0+cu130", cuda_build="13.0"
)
SERVER = replace(CARD, gpus=(A100,), cuda_archs=ARCHS, triton="3.7.1")
PIP = "/home/ada/.venv/bin/python -m pip install"
CU126 = f"{PIP} --force-reinstall torch==2.13.0 --index-url https://download.pytorch.org/whl/cu126"
CU130 = f"{PIP} --force-reinstall torch==2.13.0 --index-url https://download.pytorch.org/whl/cu130"

Check = Callable[[Machine], Finding]


def changed(base: Machine, **facts: Any) -> Machine:
    return replace(base, **facts)


@pytest.mark.parametrize("base", [LAPTOP, SERVER], ids=["laptop", "server"])
def test_a_sound_machine_has_nothing_to_mend(base: Machine) -> None:
    assert {finding.status for finding in doctor.findings(base)} == {"ok"}


def test_every_part_has_one_line() -> None:
    parts = ["Python", "PyTorch", "CPU", "memory", "GPU", "model", "disk", "notebooks", "compiler", "Triton"]
    assert [finding.part for finding in doctor.findings(LAPTOP)] == parts
    two = changed(SERVER, gpus=(A100, replace(A100, device="cuda:1")))
    assert [f.part for f in doctor.findings(two)][4:8] == ["cuda:0", "cuda:0", "cuda:1", "cuda:1"]


@pytest.mark.parametrize(
    ("check", "base", "facts", "status", "words"),
    [
        (checks.python, LAPTOP, {"python": (3, 10, 14)}, "missing", "make PYTHON=python3.12 env"),
        (checks.python, LAPTOP, {"python": (3, 11, 0)}, "ok", "3.11.0"),
        (checks.pytorch, LAPTOP, {"torch": "2.9.1+cu128"}, "missing", f"{PIP} --upgrade torch"),
        (checks.pytorch, LAPTOP, {"torch": "2.11.0a0+git12"}, "ok", "built for the CPU"),
        (checks.pytorch, CARD, {}, "ok", "2.13.0+cu130, built for CUDA 13.0"),
        (checks.cores, LAPTOP, {"allotted": 2}, "note", "2 cores of 8 (affinity or a container's limit), 8 threads; more"),
        (checks.cores, LAPTOP, {"allotted": 2}, "note", "export OMP_NUM_THREADS=2"),
        (checks.cores, LAPTOP, {"allotted": 2, "threads": 1}, "ok", "2 cores of 8"),
        (checks.cores, LAPTOP, {"load": 9.5}, "note", "other programs want 9.5 cores"),
        (checks.model_file, LAPTOP, {"model_intact": False, "model_found": False}, "note", "minillm generate Hello"),
        (checks.model_file, LAPTOP, {"model_intact": False, "model_found": False}, "note", "not fetched yet into /home/ada/"),
        (checks.model_file, LAPTOP, {"model_intact": False}, "note", "/home/ada/.cache/minillm/model.gguf is damaged"),
        (checks.disk, LAPTOP, {"disk_free": GB}, "note", "1.0 GB free in /home/ada/.cache/minillm: little"),
        (checks.disk, LAPTOP, {"disk_free": GB // 10, "model_intact": False}, "missing", "the model needs 0.3: export MINI"),
        (checks.disk, LAPTOP, {"disk_free": GB // 10}, "note", "0.1 GB free"),
        (checks.disk, LAPTOP, {"folder_writable": False, "model_intact": False}, "missing", "export MINILLM_CACHE="),
        (checks.disk, LAPTOP, {"folder_writable": False}, "ok", "90.0 GB free"),
        (checks.notebooks, LAPTOP, {"notebook_packages": ("jupyterlab", "ipykernel", "nbval")}, "note", f"{PIP} jupyter nbval"),
        (checks.notebooks, LAPTOP, {"kernel": None}, "note", "/home/ada/.venv/bin/python -m ipykernel install --sys-prefix"),
        (checks.notebooks, LAPTOP, {"kernel": None, "in_environment": False}, "note", "ipykernel install --user"),
        (checks.notebooks, LAPTOP, {"kernel": "/usr/bin/python"}, "note", "kernel runs /usr/bin/python, where minillm may be"),
        (checks.compiler, LAPTOP, {"compiler": None}, "note", "sudo apt install g++"),
        (checks.compiler, LAPTOP, {"compiler": None, "system": "darwin"}, "note", "xcode-select --install"),
        (checks.compiler, LAPTOP, {"compiler": None, "system": "win32"}, "note", "Visual Studio"),
        (checks.compiler, LAPTOP, {"compiler": None, "system": "freebsd14"}, "note", "your system's own"),
        (checks.compiler, LAPTOP, {"python_headers": False}, "note", "sudo apt install python3-dev"),
        (checks.triton, LAPTOP, {"triton": "3.7.1"}, "ok", "3.7.1"),
        (checks.triton, SERVER, {"triton": None}, "note", f"{PIP} triton"),
        (checks.triton, SERVER, {"triton": None, "system": "win32"}, "note", f"{PIP} triton-windows"),
        (gpu_checks.no_gpu, LAPTOP, {"apple_gpu": True}, "note", "--device mps"),
        (gpu_checks.no_gpu, CARD, {"driver": None, "driver_cuda": None}, "note", "580 or newer"),
        (gpu_checks.no_gpu, CARD, {"visible_devices": ""}, "note", "unset CUDA_VISIBLE_DEVICES"),
        (gpu_checks.no_gpu, CARD, {"driver_cuda": None}, "note", "--gpus all"),
        (gpu_checks.no_gpu, CARD, {"driver": "535.104.05", "driver_cuda": (12, 2)}, "note", f"580 or newer, or {CU126}"),
        (gpu_checks.no_gpu, CARD, {"driver": "470.82", "driver_cuda": (11, 4)}, "note", "update the driver to 580 or newer"),
        (gpu_checks.no_gpu, CARD, {"cuda_build": "12.6", "driver_cuda": (11, 4)}, "note", "update the driver to 525 or newer"),
        (gpu_checks.no_gpu, CARD, {"cuda_build": "14.0"}, "note", f"built for CUDA 14: update the driver, or {CU130}"),
        (gpu_checks.no_gpu, CARD, {"cuda_build": None}, "note", f"built for the CPU: {CU130}"),
        (gpu_checks.no_gpu, CARD, {"cuda_build": None, "driver_cuda": (14, 1)}, "note", CU130),
        (gpu_checks.no_gpu, CARD, {"cuda_build": None, "driver_cuda": (12, 8)}, "note", CU126),
        (gpu_checks.no_gpu, CARD, {"cuda_build": None, "driver_cuda": (11, 4)}, "note", "update the driver to 580"),
        (gpu_checks.no_gpu, CARD, {"driver": None, "driver_cuda": (12, 2)}, "note", "the driver serves CUDA 12, too old"),
        (gpu_checks.no_gpu, CARD, {}, "note", "torch.cuda.init()"),
    ],
)  # fmt: skip
def test_what_a_check_says(check: Check, base: Machine, facts: dict[str, Any], status: str, words: str) -> None:
    finding = check(changed(base, **facts))
    assert finding.status == status
    assert words in finding.words
    assert "\n" not in finding.words


def test_an_old_driver_that_no_build_serves_gets_no_command_that_cannot_help() -> None:
    assert "--index-url" not in gpu_checks.no_gpu(changed(CARD, driver_cuda=(11, 4))).words


# --- GPUs -------------------------------------------------------------------------------------------------------------


def test_a_t4_is_told_its_dtypes_and_the_stages_that_are_left() -> None:
    left = ", ".join(name for name in STAGES if name not in ("quantization", "speculative"))
    words = f"fp16 (default) and fp32, no bf16; stages {left}; not quantization, speculative: It needs 8.0."
    cpu = "Chapters that need them run on the CPU: CUDA_VISIBLE_DEVICES= .venv/bin/jupyter lab"
    told = Finding("cuda:0", "note", f"Tesla T4, compute capability 7.5: {words} {cpu}")
    assert gpu_checks.gpu_stages(SERVER, T4) == told


def test_a_newer_gpu_runs_every_stage_in_bf16() -> None:
    finding = gpu_checks.gpu_stages(SERVER, A100)
    assert (finding.status, "bf16 (default)" in finding.words, "every stage" in finding.words) == ("ok", True, True)


@pytest.mark.parametrize(
    ("archs", "capability", "runs"),
    [
        (ARCHS, (7, 5), True),
        (ARCHS, (8, 9), True),  # sm_86 code runs on 8.9: the same generation, and not newer
        (ARCHS, (7, 0), False),
        (ARCHS, (6, 1), False),
        (ARCHS, (12, 1), True),
        (ARCHS, (11, 0), False),
        ((*ARCHS, "compute_120"), (13, 0), True),  # to be compiled for it
        ((*ARCHS, "compute_120"), (6, 1), False),
        (("sm_90a",), (9, 0), True),
        (("sm_86",), (8, 0), False),
        ((), (9, 0), True),  # a build that does not say
    ],
)
def test_which_gpus_a_build_has_kernels_for(archs: tuple[str, ...], capability: tuple[int, int], runs: bool) -> None:
    assert gpu_checks.has_kernels(archs, capability) == runs


@pytest.mark.parametrize(("capability", "command"), [((6, 1), CU126), ((7, 0), CU126), ((13, 0), CU130)])
def test_a_gpu_without_kernels_is_missing_a_build(capability: tuple[int, int], command: str) -> None:
    finding = gpu_checks.gpu_stages(SERVER, replace(A100, capability=capability))
    assert finding.status == "missing"  # the GPU is the default device: commands would fail
    assert finding.words.endswith(f"--device cpu, or {command}")


# --- Memory -----------------------------------------------------------------------------------------------------------


def test_models_that_fit_are_told_apart_by_dtype() -> None:
    finding = checks.fitting_models(LAPTOP.cpu, ("fp32", "bf16"))
    fitting, large = finding.words.split("; too large: ")
    in_fp32, in_bf16 = fitting.split(", and ")
    # 12 GB: 1.7e9 parameters take 6.8 in fp32, 4e9 take 16 in fp32 and 8 in bf16, 7e9 take 14 in bf16.
    assert "smollm2-1.7b in fp32" in in_fp32
    assert in_bf16 == "qwen3-4b in bf16, with 4,096 tokens"
    assert large.split(", ")[0] == "mistral-7b-v0.1"
    assert "gemma" not in finding.words  # known in shape, and not supported


def test_bytes_needed_are_weights_cache_and_working_memory() -> None:
    config = checks.KNOWN_MODELS["llama-3-8b"]
    # 2 for k and v, 32 layers, 8 heads of 128, 2 bytes
    assert checks.bytes_needed(config, "bf16") == 2 * 8_030_261_248 + 4096 * 2 * 32 * 8 * 128 * 2 + 0.5e9
    short = replace(config, max_positions=100)
    assert checks.bytes_needed(config, "fp32") - checks.bytes_needed(short, "fp32") == 3996 * 2 * 32 * 8 * 128 * 4


@pytest.mark.parametrize(
    ("memory", "status", "words"),
    [
        (None, "note", "does not say"),
        (GB // 2, "missing", "0.5 GB free, too little for any known model"),
        (1000 * GB, "ok", "llama-3-70b in fp32, with 4,096 tokens"),
    ],
)
def test_memory_that_is_unknown_too_small_or_ample(memory: int | None, status: str, words: str) -> None:
    finding = checks.fitting_models(replace(LAPTOP.cpu, memory=memory), ("fp32", "bf16"))
    assert (finding.part, finding.status) == ("memory", status)
    assert words in finding.words
    assert "too large" not in finding.words


# --- Facts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15\nGCC 12.2.0", "535.104.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build", "580.65.06"),
        ("550.90\n", "550.90"),
        ("No devices were found\n", None),
        ("", None),
    ],
)  # fmt: skip
def test_the_version_of_a_driver(text: str, version: str | None) -> None:
    assert machine.driver_version(text) == version


@pytest.mark.parametrize(
    ("vendor", "kind", "card"),
    [("0x10de\n", "0x030200\n", True), ("0x10de\n", "0x040300\n", False), ("0x8086\n", "0x030000\n", False)],
)
def test_a_card_without_a_driver_is_seen_on_the_bus(tmp_path: Path, vendor: str, kind: str, card: bool) -> None:
    for name, files in {"00": ("0x1af4\n", "0x020000\n"), "01": (vendor, kind)}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(files[0])
        (tmp_path / name / "class").write_text(files[1])
    (tmp_path / "02").mkdir()  # one that tells nothing
    assert machine.has_nvidia_card(tmp_path) == card
    assert not machine.has_nvidia_card(tmp_path / "absent")


def test_stages_tell_themselves_what_an_old_gpu_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.refused_stages(torch.device("cpu")) == {}
    monkeypatch.setattr(Transformer, "device", property(lambda self: torch.device("cuda")))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    refused = machine.refused_stages(torch.device("cpu"))
    assert {"quantization", "quantization_int4", "speculative"} <= set(refused)
    assert {"naive", "kv_cache", "gqa", "batching_static", "batching"}.isdisjoint(refused)
    assert "compute capability 8.0 and this one has 7.5" in refused["speculative"]


def test_a_gpu_without_kernels_refuses_every_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise RuntimeError("CUDA error: no kernel image is available\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr(machine, "random_model", fail)
    assert machine.refused_stages(torch.device("cpu")) == dict.fromkeys(
        STAGES, "CUDA error: no kernel image is available"
    )


def test_looking_describes_this_machine_and_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "new" / "cache"))
    found = machine.look()
    assert found.python == sys.version_info[:3]
    assert found.folder == tmp_path and found.folder_writable
    assert not found.model_found and not found.model_intact
    assert found.notebook_packages == ()
    assert found.kernel is not None and Path(found.kernel).parent == Path(sys.executable).parent
    assert 1 <= found.allotted <= found.cores
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_was_cut_off_is_found_and_not_intact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path))
    (tmp_path / machine.MODEL_FILE).write_bytes(b"GGUF")
    found = machine.look()
    assert (found.model_found, found.model_intact) == (True, False)


def test_a_file_in_the_place_of_the_cache_folder_cannot_be_written_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "cache"))
    assert not machine.look().folder_writable


def test_a_kernel_of_another_environment_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JUPYTER_PATH comes first: a kernel there hides the one of this environment, as one in the home folder can."""
    kernels = tmp_path / "kernels" / "python3"
    kernels.mkdir(parents=True)
    spec = '{"argv": ["%s", "-m", "ipykernel_launcher"], "display_name": "Python 3", "language": "python"}'
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    for command, kernel in {"/opt/other/bin/python": "/opt/other/bin/python", "python": sys.executable}.items():
        (kernels / "kernel.json").write_text(spec % command)
        assert machine._kernel() == kernel
    (kernels / "kernel.json").write_text("{")
    assert machine._kernel() is None


def test_without_jupyter_or_a_kernel_of_its_own_there_is_no_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jupyter_client.kernelspec import KernelSpecManager, NoSuchKernel

    def none(self: object, name: str) -> None:
        raise NoSuchKernel(name)

    monkeypatch.setattr(KernelSpecManager, "get_kernel_spec", none)
    assert machine._kernel() is None
    monkeypatch.setitem(sys.modules, "jupyter_client.kernelspec", None)  # as if it were not installed
    assert machine._kernel() is None


def test_where_linux_keeps_no_version_of_the_driver_nvidia_smi_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(self: Path, *args: object) -> str:
        raise OSError

    monkeypatch.setattr(Path, "read_text", unreadable)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine._driver() is None
    tool = tmp_path / "nvidia-smi"
    for script, version in {
        "#!/bin/sh\necho 535.104.05\n": "535.104.05",
        "#!/bin/sh\nexit 9\n": None,
        "": None,
    }.items():
        tool.write_text(script)  # the last cannot be run at all
        tool.chmod(0o755)
        assert machine._driver() == version


@pytest.mark.parametrize(
    ("status", "number", "cuda"), [(0, 12040, (12, 4)), (0, 13000, (13, 0)), (0, 0, None), (100, 12040, None)]
)
def test_the_library_of_the_driver_says_which_cuda_it_serves(
    monkeypatch: pytest.MonkeyPatch, status: int, number: int, cuda: tuple[int, int] | None
) -> None:
    class Library:
        def cuDriverGetVersion(self, place: Any) -> int:
            place._obj.value = number
            return status

    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: Library())
    assert machine._driver_cuda() == cuda


def test_a_gpu_is_described_by_what_pytorch_says_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, answer in {
        "get_device_name": "Tesla T4", "get_device_capability": (7, 5), "mem_get_info": (14 * GB, 15 * GB)
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda device=None, answer=answer: answer)
    monkeypatch.setattr(machine, "pick_dtype", lambda dtype, device: torch.float16)
    monkeypatch.setattr(machine, "refused_stages", lambda device: {"quantization": f"not on {device}"})
    found = machine._gpu(1)
    assert found == Processor("cuda:1", "Tesla T4", (7, 5), 14 * GB, "fp16", {"quantization": "not on cuda:1"})


def test_the_compiler_that_was_chosen_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("g++", "my-compiler"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert machine._compiler() == str(tmp_path / "g++")
    monkeypatch.setenv("CXX", "my-compiler")
    assert machine._compiler() == str(tmp_path / "my-compiler")
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert machine._compiler() is None


# --- What is printed --------------------------------------------------------------------------------------------------


def examined(monkeypatch: pytest.MonkeyPatch, found: Machine) -> str:
    monkeypatch.setattr(doctor, "look", lambda: found)
    text = io.StringIO()
    doctor.examine(Console(file=text, width=100))
    return text.getvalue()


def test_one_line_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = examined(monkeypatch, LAPTOP).splitlines()
    assert len(lines) == len(list(doctor.findings(LAPTOP)))
    assert all(line.startswith("ok ") for line in lines)


def test_brackets_in_a_path_are_no_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "/home/[red]ada" in examined(monkeypatch, changed(LAPTOP, model=Path("/home/[red]ada")))


def test_what_is_missing_fails_the_command_after_all_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = changed(LAPTOP, torch="2.4.0", folder_writable=False, model_intact=False)
    monkeypatch.setattr(doctor, "look", lambda: found)
    assert main(["doctor"]) == 1
    output, error = capsys.readouterr()
    assert len(output.splitlines()) == len(list(doctor.findings(found)))
    assert error == "minillm: Commands will fail here: mend the lines that say missing (PyTorch, disk).\n"


def test_notes_do_not_fail_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    text = examined(monkeypatch, changed(LAPTOP, compiler=None, model_intact=False, model_found=False))
    assert [line.split()[0] for line in text.splitlines()].count("note") == 2


def test_no_warning_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch warns about old drivers and old GPUs. The checks say it better."""

    def warn() -> bool:
        warnings.warn("CUDA initialization: the NVIDIA driver on your system is too old", stacklevel=1)
        return False

    monkeypatch.setattr(torch.cuda, "is_available", warn)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert machine.look().gpus == ()
    assert [str(warning.message) for warning in caught] == []


def test_this_machine_is_told_all_that_concerns_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MINILLM_CACHE", str(tmp_path / "cache"))
    assert main(["doctor"]) == 0
    output, error = capsys.readouterr()
    lines = {
        words.split()[0]: (mark, words) for mark, words in (line.split(maxsplit=1) for line in output.splitlines())
    }
    assert {"Python", "PyTorch", "CPU", "memory", "model", "disk", "notebooks", "compiler", "Triton"} <= set(lines)
    assert lines["model"][0] == "note" and f"not fetched yet into {tmp_path}" in lines["model"][1]
    assert error == ""
    assert not (tmp_path / "cache").exists()
