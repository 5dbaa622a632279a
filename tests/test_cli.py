"""The commands as a user meets them: what they print and write, and one sentence for everything that goes wrong."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command_helpers import Run, assert_one_sentence, process
from helpers import one_thread  # noqa: F401

import minillm
from minillm import cli, doctor
from minillm.cli import main
from minillm.config import known_model
from minillm.errors import MinillmError
from minillm.roofline.ceilings import CeilingMeter
from minillm.roofline.hardware import known_hardware
from minillm.roofline.position import predict_stage
from minillm.stages import STAGES, naive

COMMANDS = ["tour", "generate", "batch", "roofline", "predict", "profile", "evaluate", "grade", "doctor"]
PREDICT = ["predict", "--model", "tiny", "--hardware", "h100-sxm", "--stage", "kv_cache"]
GENERATE = ["generate", "hi", "--model", "tiny", "--device", "cpu", "--max-new-tokens", "3"]
TOUR = ["tour", "--model", "tiny", "--device", "cpu", "--max-new-tokens", "2"]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.delenv("MINILLM_DEBUG", raising=False)


# --- wrong commands: status 2 -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([], "COMMAND"),
        (["fly"], "'fly'"),
        (["generate"], "prompt"),
        (["predict"], "--model"),
        (["tour", "--nonsense"], "--nonsense"),
        ([*TOUR, "--max-new-tokens", "many"], "'many'"),
        ([*TOUR, "--max-new-tokens", "0"], "max_new_tokens is 0"),
        ([*TOUR, "--max-new-tokens", "-1"], "max_new_tokens is -1"),
        ([*TOUR, "--max-new-tokens", "1000000"], "256 positions"),
        ([*TOUR, "--stages", "naive,warp"], "'warp'"),
        ([*TOUR, "--stages", "naive,"], "Unknown stage ''"),
        ([*TOUR, "--stages", ""], "Unknown stage ''"),
        ([*TOUR, "--prompt", ""], "prompt is empty"),
        ([*TOUR, "--prompt", " \n"], "prompt is empty"),
        ([*TOUR, "--prompt", "x" * 300], "256 positions"),
        ([*TOUR, "--model", "gpt-9"], "Unknown model 'gpt-9'"),
        ([*TOUR, "--device", "abacus"], "Unknown device 'abacus'"),
        ([*TOUR, "--device", "xpu"], "'xpu' is not supported"),
        ([*TOUR, "--device", "meta"], "meta device"),
        ([*TOUR, "--dtype", "fp7"], "Unknown dtype 'fp7'"),
        ([*TOUR, "--plot", "picture.bmp"], ".png, .svg, .pdf"),
        ([*TOUR, "--plot", "picture"], ".png, .svg, .pdf"),
        ([*TOUR, "--price-per-hour", "cheap"], "positive number of dollars"),
        ([*TOUR, "--price-per-hour", "0"], "positive number of dollars"),
        ([*TOUR, "--price-per-hour", "nan"], "positive number of dollars"),
        (["generate", "", "--model", "tiny"], "prompt is empty"),
        ([*GENERATE, "--stage", "warp"], "Unknown stage 'warp'"),
        ([*GENERATE, "--model", "gpt-9"], "Unknown model 'gpt-9'"),
        ([*GENERATE, "--model", "random:gpt-9"], "Unknown model 'gpt-9'"),
        ([*GENERATE, "--device", "abacus"], "Unknown device"),
        ([*GENERATE, "--device", "meta"], "meta device"),
        ([*GENERATE, "--dtype", "fp7"], "Unknown dtype"),
        ([*GENERATE, "--max-new-tokens", "0"], "max_new_tokens is 0"),
        ([*GENERATE, "--max-new-tokens", "-1"], "max_new_tokens is -1"),
        (["generate", "x" * 300, "--model", "tiny"], "256 positions"),
        ([*GENERATE, "--temperature", "-1"], "temperature"),
        ([*GENERATE, "--temperature", "nan"], "temperature"),
        ([*GENERATE, "--top-p", "2"], "top_p"),
        ([*GENERATE, "--top-k", "0"], "top_k"),
        ([*GENERATE, "--seed", "-1"], "seed"),
        (["roofline", "--device", "abacus"], "Unknown device"),
        (["roofline", "--device", "meta"], "meta device"),
        (["roofline", "--dtype", "fp7"], "Unknown dtype"),
        ([*PREDICT, "--model", "gpt-9"], "Unknown model 'gpt-9'"),
        ([*PREDICT, "--hardware", "abacus"], "Unknown hardware 'abacus'"),
        ([*PREDICT, "--stage", "warp"], "Unknown stage 'warp'"),
        ([*PREDICT, "--dtype", "fp7"], "no fp7 arithmetic"),
        ([*PREDICT, "--hardware", "t4", "--dtype", "bf16"], "no bf16 arithmetic: choose fp16 or fp32"),
        ([*PREDICT, "--hardware", "this", "--dtype", "fp7"], "Unknown dtype 'fp7'"),
        ([*PREDICT, "--hardware", "this", "--overhead", "5"], "leave --overhead out"),
        ([*PREDICT, "--context", "1"], "context is 1"),
        ([*PREDICT, "--context", "-4"], "context is -4"),
        ([*PREDICT, "--context", "99999999999999999999999"], "context is 9"),
        ([*PREDICT, "--batch", "0"], "batch is 0"),
        ([*PREDICT, "--batch", "99999999999999999999999"], "batch is 9"),
        ([*PREDICT, "--overhead", "-1"], "microseconds"),
        ([*PREDICT, "--overhead", "much"], "microseconds"),
        (["grade", "--time-limit", "long"], "positive number of seconds"),
    ],
)
def test_a_wrong_command_is_told_in_one_sentence(run: Run, argv: list[str], says: str) -> None:
    status, output, error = run(*argv)
    assert_one_sentence(error)
    assert says in error
    assert (status, output) == (2, "")


# --- work that fails: status 1 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([*GENERATE, "--model", "gemma-3-270m"], "supported are llama"),
        ([*PREDICT, "--model", "gemma-3-270m"], "supported are llama"),
        ([*GENERATE, "--model", "missing.gguf"], "missing.gguf"),
        ([*TOUR, "--json", "/proc/no/tour.json"], "/proc/no/tour.json cannot be written"),
        ([*TOUR, "--plot", "/proc/no/tour.png"], "/proc/no/tour.png cannot be written"),
        ([*PREDICT, "--json", "/proc/no/p.json"], "cannot be written"),
        (["roofline", "--json", "/proc/no/r.json"], "cannot be written"),
        ([*PREDICT, "--json", "/"], "name a file"),
        ([*PREDICT, "--json", ""], "name a file"),
        ([*PREDICT, "--json", f"/tmp/{'x' * 300}.json"], "File name too long"),
    ],
)
def test_work_that_cannot_be_done_is_told_in_one_sentence(run: Run, argv: list[str], says: str) -> None:
    status, output, error = run(*argv)
    assert_one_sentence(error)
    assert says in error
    assert (status, output) == (1, "")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
@pytest.mark.parametrize(
    "argv", [[*TOUR, "--device", "cuda"], [*GENERATE, "--device", "cuda:1"], ["roofline", "--device", "cuda"]]
)
def test_cuda_where_there_is_none(run: Run, argv: list[str]) -> None:
    status, output, error = run(*argv)
    assert_one_sentence(error)
    assert "use --device cpu" in error
    assert (status, output) == (1, "")


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_path_that_cannot_be_written_is_told_before_the_work(
    run: Run, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("minillm.commands.tour.load", lambda *_: pytest.fail("the model was loaded first"))
    status, _, error = run(*TOUR, option, str(tmp_path / "file" / "result.png"))
    assert_one_sentence(error)
    assert (status, sorted(tmp_path.iterdir())) == (1, [tmp_path / "file"])


@pytest.mark.parametrize("existing", [None, "old"])
def test_a_full_disk_leaves_what_was_there(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existing: str | None
) -> None:
    def full(self: Path, data: bytes) -> int:
        with self.open("wb") as file:
            file.write(data[:10])
        raise OSError(28, "No space left on device")

    path = tmp_path / "prediction.json"
    if existing:
        path.write_text(existing)
    monkeypatch.setattr(Path, "write_bytes", full)
    status, _, error = run(*PREDICT, "--json", str(path))
    assert_one_sentence(error)
    assert (status, "No space left on device" in error) == (1, True)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == ([(path.name, "old")] if existing else [])


def test_an_interrupted_write_leaves_nothing(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Path, target: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    assert run(*PREDICT, "--json", str(tmp_path / "prediction.json"))[0] == 130
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_made(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "prediction.json"
    assert run(*PREDICT, "--json", str(path))[0] == 0
    assert [p.name for p in path.parent.iterdir()] == ["prediction.json"]


def test_an_error_that_nobody_foresaw_is_still_one_line(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(console: object) -> None:
        raise RuntimeError("a pipe burst.\nand water everywhere")

    monkeypatch.setattr(doctor, "examine", broken)
    status, output, error = run("doctor")
    assert error == (
        "minillm: Unexpected RuntimeError: a pipe burst; set MINILLM_DEBUG=1 to see where, and please report it.\n"
    )
    assert (status, output) == (1, "")
    monkeypatch.setenv("MINILLM_DEBUG", "1")
    with pytest.raises(RuntimeError, match="a pipe burst"):
        main(["doctor"])


OUT_OF_MEMORY = "minillm: The device ran out of memory: use a smaller model or dtype, or fewer tokens.\n"


@pytest.mark.parametrize(
    ("error", "status", "sentence"),
    [
        (KeyboardInterrupt(), 130, "minillm: Interrupted.\n"),
        (MinillmError("No."), 1, "minillm: No.\n"),
        (
            OSError(5, "Input/output error", "/data/x"),
            1,
            "minillm: /data/x cannot be read or written: Input/output error.\n",
        ),
        (OSError(28, "No space left"), 1, "minillm: The output cannot be read or written: No space left.\n"),
        (MemoryError(), 1, OUT_OF_MEMORY),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."), 1, OUT_OF_MEMORY),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), 1, OUT_OF_MEMORY),
    ],
)
def test_errors_and_their_exit_status(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: BaseException, status: int, sentence: str
) -> None:
    def fail(console: object) -> None:
        raise error

    monkeypatch.setattr(doctor, "examine", fail)
    assert run("doctor") == (status, "", sentence)


# --- commands that do their work --------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command(run: Run, command: str) -> None:
    status, output, error = run(command, "--help")
    assert output.startswith(f"usage: minillm {command}")
    assert (status, error) == (0, "")


def test_help_names_every_command(run: Run) -> None:
    status, output, error = run("--help")
    assert re.findall(r"^    (\w+) ", output, re.MULTILINE) == COMMANDS
    assert (status, error) == (0, "")


def test_help_answers_without_loading_pytorch() -> None:
    code = "import sys; from minillm.cli import main\ntry: main(['--help'])\nfinally: sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


@pytest.mark.parametrize("stage", ["naive", "kv_cache"])
@pytest.mark.parametrize("chat", [[], ["--chat"]])
def test_generate_prints_the_text_and_the_five_numbers(run: Run, stage: str, chat: list[str]) -> None:
    status, output, error = run(*GENERATE, "--stage", stage, *chat)
    assert (status, error) == (0, "")
    *text, numbers = output.rstrip("\n").split("\n")
    model, tokenizer = minillm.load("tiny", "cpu")
    prompt = tokenizer.chat("hi") if chat else tokenizer.encode("hi")
    expected = naive.generate(model, prompt, 3, stop_tokens=tokenizer.stop_tokens).tokens
    assert "\n".join(text) == tokenizer.decode(expected)
    for part in ("3 tokens, TTFT ", "ITL p50 ", "P99 ", " tokens/s, $", " per million tokens at $1 an hour"):
        assert part in numbers


def test_a_seed_gives_the_same_text_again_and_greedy_needs_none(run: Run) -> None:
    def text(*options: str) -> str:
        return run(*GENERATE, "--max-new-tokens", "12", *options)[1].rsplit("\n", 2)[0]

    drawn = text("--temperature", "1", "--seed", "7")
    assert drawn == text("--temperature", "1", "--seed", "7") != text("--temperature", "1", "--seed", "8")
    assert text() == text("--temperature", "0", "--seed", "8")


def test_predict_prints_and_writes_the_same(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "prediction.json"
    arguments = ["--context", "100", "--batch", "4", "--dtype", "fp16", "--overhead", "5"]
    status, output, error = run(*PREDICT, *arguments, "--json", str(path))
    assert (status, error) == (0, "")
    data = json.loads(path.read_text())
    assert list(data) == ["model", "hardware", "stage", "batch", "context", "phases"]
    assert (data["model"], data["hardware"], data["stage"]) == ("tiny", "h100-sxm", "kv_cache")
    assert (data["batch"], data["context"]) == (4, 100)
    ceilings = known_hardware("h100-sxm").ceilings("fp16", 5 * 1e-6)
    expected = predict_stage(STAGES["kv_cache"], known_model("tiny"), ceilings, context=100, batch=4)
    assert data["phases"] == [position.as_json() for position in expected]
    for phase in data["phases"]:
        assert list(phase) == ["phase", "flops", "bytes", "ideal_bytes", "intensity", "predicted_s", "bound"]
        assert f"{phase['intensity']:.3g}" in output
    assert "NVIDIA H100 SXM, fp16" in output
    assert "5 us overhead an operator" in output
    assert "Batch 4; prefill of 100 tokens" in output


def test_predict_takes_16_bits_where_the_hardware_has_them(run: Run) -> None:
    assert "NVIDIA H100 SXM, bf16" in run(*PREDICT)[1]
    assert "NVIDIA T4, fp16" in run(*PREDICT, "--hardware", "t4")[1]
    assert "Apple M1, fp32" in run(*PREDICT, "--hardware", "m1")[1]


@pytest.mark.parametrize("model", ["smollm2-135m", "qwen3-0.6b", "mistral-7b-v0.1", "llama-3-70b"])
def test_predict_knows_models_of_every_family_beyond_their_positions(run: Run, model: str) -> None:
    status, output, error = run(*PREDICT, "--model", model, "--context", "200000")
    assert (status, error) == (0, "")
    assert model in output


@pytest.fixture
def small_meter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ceilings of made-up samples: measuring takes a second."""
    monkeypatch.setattr(CeilingMeter, "_measure", lambda self: (2e10, 1e11, 8e-6))


def test_roofline_prints_and_writes_the_ceilings(run: Run, tmp_path: Path, small_meter: None) -> None:
    path = tmp_path / "roofline.json"
    status, output, error = run("roofline", "--device", "cpu", "--dtype", "bf16", "--json", str(path))
    assert (status, error) == (0, "")
    for part in ("20 GB/s", "100 GFLOP/s", "5 FLOP/byte", "8 us an operator", "not in the table", "bf16"):
        assert part in output
    data = json.loads(path.read_text())
    assert list(data) == ["device", "dtype", "ceilings", "datasheet"]
    assert data["dtype"] == "bf16"
    assert data["ceilings"] == {
        "bandwidth_bytes_per_s": 2e10,
        "peak_flop_per_s": 1e11,
        "overhead_s": 8e-6,
        "ridge_flop_per_byte": 5.0,
    }
    assert data["datasheet"] is None


def test_predict_for_this_machine_measures_it(run: Run, small_meter: None) -> None:
    status, output, error = run(*PREDICT, "--hardware", "this", "--dtype", "fp32")
    assert (status, error) == (0, "")
    assert "Ceilings (measured): 20 GB/s, 100 GFLOP/s, 8 us overhead an operator" in " ".join(output.split())


# --- in a process of its own ------------------------------------------------------------------------------------------


def test_the_installed_command_ends_with_the_status_of_its_work() -> None:
    wrong = process("tour", "--max-new-tokens", "x")
    output, error = wrong.communicate(timeout=60)
    assert (wrong.returncode, output) == (2, "")
    assert_one_sentence(error)


@pytest.mark.parametrize("argv", [["--help"], [*GENERATE, "--max-new-tokens", "200"]])
def test_a_reader_who_leaves_ends_the_command_in_silence(argv: list[str]) -> None:
    writer = process(*argv)
    assert writer.stdout is not None
    assert writer.stderr is not None
    writer.stdout.close()
    error = writer.stderr.read()
    writer.stderr.close()
    assert (writer.wait(timeout=60), error) == (1, "")


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="needs /dev/full")
@pytest.mark.parametrize("argv", [["--help"], PREDICT])
def test_a_full_disk_behind_the_output_is_told_in_one_sentence(argv: list[str]) -> None:
    with open("/dev/full", "w") as full:
        writer = process(*argv, stdout=full)
        _, error = writer.communicate(timeout=60)
    assert_one_sentence(error)
    assert (writer.returncode, "No space left on device" in error) == (1, True)


def test_json_goes_into_a_pipe_and_does_not_replace_it(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)  # a few kB wait in the pipe until they are read
    assert main([*PREDICT, "--json", str(pipe)]) == 0
    assert json.loads(os.read(reader, 1 << 16))["model"] == "tiny"
    os.close(reader)
    assert [path for path in tmp_path.iterdir() if path.is_fifo()] == [pipe]


def test_a_terminal_without_the_characters_shows_others() -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "OMP_NUM_THREADS": "1"}
    writer = process(*GENERATE, "--max-new-tokens", "20", env=environment)
    output, error = writer.communicate(timeout=60)
    assert (writer.returncode, error) == (0, "")
    assert output.isascii()


def test_ctrl_c_ends_a_generation_with_one_word() -> None:
    writer = process(*GENERATE, "--max-new-tokens", "250", "--stage", "naive", bufsize=0, text=False)
    assert writer.stdout is not None
    writer.stdout.read(1)  # it has begun
    writer.send_signal(signal.SIGINT)
    _, error = writer.communicate(timeout=60)
    assert (writer.returncode, error) == (130, b"minillm: Interrupted.\n")


def test_the_entry_point_is_main() -> None:
    from importlib.metadata import entry_points

    [script] = entry_points(group="console_scripts", name="minillm")
    assert script.load() is cli.main
