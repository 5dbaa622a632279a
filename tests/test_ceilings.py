"""Measured ceilings and the datasheet table. Times are checked for sanity only: a shared machine promises nothing."""

import statistics
import time
from copy import copy
from dataclasses import replace

import pytest
import torch
from helpers import one_thread  # noqa: F401 (a fixture)

from minillm.device import wait_for
from minillm.errors import UsageError
from minillm.roofline import ceilings
from minillm.roofline.ceilings import CeilingMeter, Ceilings, _room, device_name, seconds
from minillm.roofline.hardware import HARDWARE, datasheet_ceilings, known_hardware

CEILINGS = Ceilings("a machine", "fp32", bandwidth=1e8, peak=1e9, overhead=1e-3)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def meter() -> CeilingMeter:
    return CeilingMeter(CPU, torch.float32, 2**20)


# --- the roof ---------------------------------------------------------------------------------------------------------


def test_the_ridge_is_where_slope_and_roof_meet() -> None:
    assert CEILINGS.ridge == 10
    assert CEILINGS.attainable(10) == CEILINGS.peak


def test_left_of_the_ridge_bandwidth_binds_and_right_of_it_the_peak() -> None:
    assert CEILINGS.attainable(0.5) == 5e7
    assert CEILINGS.attainable(9.999) < CEILINGS.peak
    assert CEILINGS.attainable(11) == CEILINGS.attainable(1e6) == CEILINGS.peak


def test_json_of_ceilings_has_the_keys_of_the_contract() -> None:
    assert CEILINGS.as_json() == {
        "bandwidth_bytes_per_s": 1e8,
        "peak_flop_per_s": 1e9,
        "overhead_s": 1e-3,
        "ridge_flop_per_byte": 10.0,
    }


# --- the meter --------------------------------------------------------------------------------------------------------


def test_ceilings_are_medians_of_each_column(monkeypatch: pytest.MonkeyPatch) -> None:
    """The samples are of different rounds: the median of one limit is not tied to that of another."""
    rounds = iter([(0.0, 0.0, 0.0), (5.0, 10.0, 0.3), (1.0, 30.0, 0.1), (3.0, 20.0, 0.2), (100.0, 5.0, 9.0)])
    monkeypatch.setattr(CeilingMeter, "_measure", lambda self: next(rounds))
    meter = CeilingMeter(CPU, torch.float32, 2**20)  # takes the first one, to warm up: it must not count
    for _ in range(3):
        meter.sample()
    measured = meter.ceilings()
    assert (measured.bandwidth, measured.peak, measured.overhead) == (3.0, 20.0, 0.2)
    meter.sample()
    assert meter.ceilings().bandwidth == statistics.median([5.0, 1.0, 3.0, 100.0]) == 4.0


def test_a_meter_without_samples_takes_one(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(CeilingMeter, "_measure", lambda self: calls.append(1) or (1.0, 2.0, 3.0))
    meter = CeilingMeter(CPU, torch.float32, 2**20)
    assert meter.ceilings().peak == 2.0
    assert len(calls) == 2
    meter.ceilings()
    assert len(calls) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sample_on_this_cpu_is_plausible(dtype: torch.dtype) -> None:
    """Within wide bounds: a slow, busy core reads 10 MB/s at worst, and no CPU reads 10 TB/s from memory."""
    measured = CeilingMeter(CPU, dtype, 2**25).ceilings()
    assert 1e7 < measured.bandwidth < 1e13
    assert 1e6 < measured.peak < 1e15
    assert 1e-8 < measured.overhead < 1e-1
    assert measured.ridge == measured.peak / measured.bandwidth
    assert (measured.dtype, measured.source) == ({torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype], "measured")
    assert measured.device == device_name(CPU)


def test_the_buffer_is_as_large_as_the_working_set() -> None:
    assert CeilingMeter(CPU, torch.float32, 3 * 2**20)._buffer.nbytes == 3 * 2**20


def test_a_large_working_set_is_read_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 GiB of it, and of a GPU's memory half of what is free."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**30, 2**34))
    assert (_room(CPU), _room(torch.device("cuda"))) == (2**33, 2**29)
    monkeypatch.setattr(ceilings, "LARGEST_BUFFER", 2**20)
    assert CeilingMeter(CPU, torch.float32, 2**40)._buffer.nbytes == 2**20


def test_rates_are_work_over_time(meter: CeilingMeter, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock on which every part takes 2 s, the three figures follow from the work alone."""

    def two_seconds(fn: object, device: torch.device) -> float:
        return 2.0

    monkeypatch.setattr("minillm.roofline.ceilings.seconds", two_seconds)
    bandwidth, peak, overhead = meter._measure()
    assert bandwidth == 2**26 / 2  # the buffer of 2^20 bytes, 64 times
    assert peak == 2 * 1024**3 / 2
    # A step of the tiny model is repeated until 2,000 operators have run.
    assert 2_000 <= 2.0 / overhead < 2_000 + meter._tiny_cost


def test_a_small_working_set_is_read_several_times(meter: CeilingMeter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bandwidth is bytes over time all the same: of one short read, most would be the launch or the threads' waiting."""
    monkeypatch.setattr("minillm.roofline.ceilings.seconds", lambda fn, device: (fn(), 2.0)[1])
    assert meter._measure()[0] == 64 * 2**20 / 2  # 64 MiB at once or not
    on_gpu = copy(meter)
    on_gpu.device = torch.device("cuda")
    assert on_gpu._measure()[0] == 100 * 2**20 / 2  # of the 2 GiB there as much as 100 reads give


def test_waiting_is_for_the_device_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    wait_for(CPU)
    wait_for(torch.device("cuda:1"))
    assert waited == [torch.device("cuda:1")]


def test_seconds_are_those_of_the_call() -> None:
    assert seconds(lambda: time.sleep(0.01), CPU) >= 0.01


# --- the datasheet ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype", "ridge"),
    [
        ("t4", "fp16", 203),
        ("a10", "bf16", 208),
        ("a10g", "bf16", 117),
        ("l4", "bf16", 403),
        ("rtx-3090", "bf16", 76),
        ("rtx-4090", "bf16", 164),
        ("a100-40", "bf16", 201),
        ("a100-80", "bf16", 153),
        ("h100-pcie", "bf16", 378),
        ("h100-sxm", "bf16", 295),
        ("h200", "bf16", 206),
        ("b200", "bf16", 281),
        ("m1", "fp32", 38),
        ("m1-pro", "fp32", 26),
        ("m1-max", "fp32", 26),
        ("m1-ultra", "fp32", 26),
        ("epyc-9654", "fp32", 16),
        ("xeon-8480", "fp32", 23),
        ("xeon-8480", "bf16", 745),
    ],
)
def test_ridges_are_those_of_dense_peaks_and_nominal_bandwidth(name: str, dtype: str, ridge: float) -> None:
    ceilings = HARDWARE[name].ceilings(dtype)
    assert ceilings.ridge == pytest.approx(ridge, abs=0.5)
    assert (ceilings.source, ceilings.overhead) == ("datasheet", 0)


def test_fp16_is_as_fast_as_bf16_where_there_is_both() -> None:
    for hardware in HARDWARE.values():
        if {"bf16", "fp16"} <= hardware.tflops.keys():
            assert hardware.tflops["bf16"] == hardware.tflops["fp16"] > hardware.tflops["fp32"]


def test_the_h100_has_989_teraflops_and_not_the_sparse_1979() -> None:
    ceilings = HARDWARE["h100-sxm"].ceilings("bf16", overhead=5e-6)
    assert (ceilings.peak, ceilings.bandwidth, ceilings.overhead) == (989.4e12, 3.35e12, 5e-6)


def test_a_t4_has_no_bf16() -> None:
    with pytest.raises(UsageError, match=r"^NVIDIA T4 has no bf16 arithmetic: choose fp16 or fp32\.$"):
        HARDWARE["t4"].ceilings("bf16")


@pytest.mark.parametrize("name", ["h100", "H100-SXM", "", "gpu"])
def test_unknown_hardware_is_refused_with_the_names_there_are(name: str) -> None:
    with pytest.raises(UsageError, match=rf"^Unknown hardware '{name}': choose one of .*h100-sxm.*\.$"):
        known_hardware(name)


def test_names_are_those_of_the_table() -> None:
    assert all(known_hardware(name).name == name for name in HARDWARE)
    devices = [device for hardware in HARDWARE.values() for device in hardware.device_names]
    assert len(devices) == len(set(devices))


def test_a_gpu_is_found_in_the_table_by_what_cuda_calls_it() -> None:
    def on(device: str, dtype: str = "bf16") -> Ceilings | None:
        return datasheet_ceilings(replace(CEILINGS, device=device, dtype=dtype))

    assert on("NVIDIA H100 80GB HBM3") == HARDWARE["h100-sxm"].ceilings("bf16")
    assert on("NVIDIA H100 PCIe") == HARDWARE["h100-pcie"].ceilings("bf16")
    assert on("NVIDIA A10G", "fp32") == HARDWARE["a10g"].ceilings("fp32")
    assert on("NVIDIA A10") == HARDWARE["a10"].ceilings("bf16")
    assert on("Tesla T4", "fp16") == HARDWARE["t4"].ceilings("fp16")
    assert on("Tesla T4", "bf16") is None
    assert on("NVIDIA H100 80GB HBM4") is None
    assert on(device_name(CPU)) is None
