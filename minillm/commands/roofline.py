"""`minillm roofline`: this machine's measured ceilings, beside the datasheet."""

import argparse

import torch

from minillm.config import DEFAULT_MODEL, known_model
from minillm.device import pick_device, pick_dtype
from minillm.files import check_writable, write_json
from minillm.report import ceilings_table, make_console
from minillm.roofline.ceilings import CeilingMeter, Ceilings
from minillm.roofline.hardware import datasheet_ceilings

SAMPLES = 7


def roofline(args: argparse.Namespace) -> None:
    """Print the ceilings. Raises `UsageError` for a wrong command, `MinillmError` for a device that is not there."""
    check_writable(args.json)
    device = pick_device(args.device)
    measured = measured_ceilings(device, pick_dtype(args.dtype, device))
    datasheet = datasheet_ceilings(measured)
    make_console().print(ceilings_table(measured, datasheet))
    if args.json:
        sheet = datasheet.as_json() if datasheet else None
        data = {"device": measured.device, "dtype": measured.dtype, "ceilings": measured.as_json(), "datasheet": sheet}
        write_json(args.json, data)


def measured_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """The ceilings of this machine, for a working set of the default model's size: medians of SAMPLES samples."""
    meter = CeilingMeter(device, dtype, known_model(DEFAULT_MODEL).parameter_count * dtype.itemsize)
    for _ in range(SAMPLES):
        meter.sample()
    return meter.ceilings()
