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
    "ch01": {
        "causal_attention": 3,
        "rope": 3,
        "greedy": 1,
        "top_p": 2,
        "draw": 2,
        "generate": 3,
        "naive_flops": 3,
        "crossover": 2,
    },
    "ch02": {
        "positions": 2,
        "cache_decode": 4,
        "cache_chunks": 3,
        "cache_full": 2,
        "kv_bytes_per_token": 1,
        "largest_batch": 2,
        "predict_speedup": 3,
        "speedup_guesses": 2,
    },
}

DIGESTS: dict[str, str] = {
    "conftest.py": "0e3729f43d56daf5df4636677702b4f8e2e144b04b7abf6df71a0d96604540a4",
    "ch00/mutants.py": "cbd1da4aaea0a51499df51d67c29f86f0ccd7ab08ac8186d2458dd9bfdbe79be",
    "ch00/solution.py": "2f2782afade6b97e5f022705e5d168d9883d1616603986b353ea543fc97dbf0f",
    "ch00/test_exercise.py": "084322b6f77a839f2c6239e30a0efade11fdb3f088968d426ba6bfed83bbb82d",
    "ch01/mutants.py": "2dfee377d6ed2fa87eaf261e9febc9491b89edfb7dfa3d548f981b0753c7e2c1",
    "ch01/solution.py": "55bb94878c91fa4ed3181abc14449def09f874b67990dbe35aef2e1d9381ce4f",
    "ch01/test_exercise.py": "bf25c7c28c49468b600565910f1c34447aff8ddf60dea9ede0e3b0c6e94d67e1",
    "ch02/mutants.py": "10a63d10f30d66fd38518af3cbd4371d539bc63a138c1c44a5a99ff21ddba6ca",
    "ch02/solution.py": "dd3c21599c6e60e35281f0a7537f38c8c62ccd09c45e6dd880426e3705c8982c",
    "ch02/test_exercise.py": "1d55c6c391de70dcb522ebc4409c2a0d75bc0a1ac048996f223303d864e6ae20",
}
