"""Written by `python -m minillm.grading`: the exercises, and SHA-256 of the files that grade them."""

EXERCISES: dict[str, dict[str, int]] = {
    "ch00": {
        "ttft": 1,
        "itl": 1,
        "tpot": 1,
        "p99_interpolated": 1,
        "p99_nearest": 1,
        "usd_per_million": 1,
        "linear_intensity": 2,
        "ridge": 1,
        "attainable": 1,
        "binding_limit": 2,
        "decode_seconds": 3,
        "decode_guess_ms": 1,
        "step_intensity": 2,
        "step_intensity_limit": 2,
    },
}

DIGESTS: dict[str, str] = {
    "conftest.py": "0e3729f43d56daf5df4636677702b4f8e2e144b04b7abf6df71a0d96604540a4",
    "ch00/mutants.py": "cbd1da4aaea0a51499df51d67c29f86f0ccd7ab08ac8186d2458dd9bfdbe79be",
    "ch00/solution.py": "1e66b992f50cb980d1a56ca39fc7c694cc7e27c840f00eea76b07f1800c4d6a3",
    "ch00/test_exercise.py": "084322b6f77a839f2c6239e30a0efade11fdb3f088968d426ba6bfed83bbb82d",
}
