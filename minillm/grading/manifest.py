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
    "ch00/mutants.py": "36d63af057b42b2c0f5b7882163a99ac510fb6fd43b69df93aae82070d8618f8",
    "ch00/solution.py": "2f2782afade6b97e5f022705e5d168d9883d1616603986b353ea543fc97dbf0f",
    "ch00/test_exercise.py": "3bd6b7d1e43c8704559f340244a309685ec55b83e878838b1d408507b4f27785",
    "ch01/mutants.py": "2bc0fca8e9afb47d6d4b0d786d88a283e691fbe3d6915b2ff56c78e02e77a5d9",
    "ch01/solution.py": "55bb94878c91fa4ed3181abc14449def09f874b67990dbe35aef2e1d9381ce4f",
    "ch01/test_exercise.py": "7ae41ec4c0c2e25039124b32fed0d45bf5ff61306e014b2f5be0604d04b5597e",
    "ch02/mutants.py": "26d904d8d0b98dfa60e1b59c8a7da3d981974e60b9ca77e0f3f6bf4b91229145",
    "ch02/solution.py": "dd3c21599c6e60e35281f0a7537f38c8c62ccd09c45e6dd880426e3705c8982c",
    "ch02/test_exercise.py": "6c561bd08d6891fefcf84c00f3584932475a5a8e047063a2ff45ec2084b8d1fd",
}
