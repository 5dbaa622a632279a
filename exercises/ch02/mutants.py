"""Wrong answers to the exercises of chapter 2, each of which its grader must refuse."""

from minillm.grading.mutants import Mutant, changed

ARANGE = "return torch.arange(start, self.length)[None]"
APPEND_K = "self.keys[layer] = torch.cat([self.keys[layer], k], dim=2)"
APPEND_V = "self.values[layer] = torch.cat([self.values[layer], v], dim=2)"
VISIBLE = "torch.arange(S) <= torch.arange(S - T, S)[:, None]"
SDPA = "return F.scaled_dot_product_attention(q, keys, values, attn_mask=visible)"
CHECK = "if self.length + n_tokens > self.capacity:"
REFUSE = 'raise ValueError(f"the cache holds {self.length} of {self.capacity} tokens, and {n_tokens} more do not fit")'
STEP_NAIVE = "naive += max((2 * P * i + 4 * A * L * i * i) / peak, weights / bandwidth)"
STEP_CACHED = "cached += max((2 * P + 4 * A * L * i) / peak, (weights + a_token * i) / bandwidth)"

# A cache of another build, with one block of memory for all layers, and what goes wrong in such caches.
BLOCK = """
class KVCache:
    def __init__(self, config, capacity):
        self.config, self.capacity, self.length, self.store = config, capacity, 0, None

    def positions(self, n_tokens):
        if self.length + n_tokens > self.capacity:
            raise ValueError("full")
        self.length += n_tokens
        return torch.arange(self.length - n_tokens, self.length)[None]

    def attend(self, layer, q, k, v):
        B, H, T, D = k.shape
        if self.store is None:
            self.store = torch.zeros(2, self.config.n_layers, B, H, self.capacity, D, dtype=k.dtype)
        start, S = self.length - T, self.length
        self.store[:, layer, :, :, start:S] = torch.stack([k, v])
        k, v = self.store[:, layer, :, :, :S].repeat_interleave(self.config.group_size, 3 - 1)
        visible = torch.ones(T, S, dtype=torch.bool).tril(S - T)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
"""


MUTANTS = [
    # positions
    Mutant("positions", "Starts at 0 in every pass.", (ARANGE, "return torch.arange(n_tokens)[None]"), says="not from 0"),
    Mutant("positions", "Starts at 1.", (ARANGE, "return torch.arange(start + 1, self.length + 1)[None]"), says="first position is 0"),
    Mutant("positions", "Gives a decoded token the position of the one before it.", (ARANGE, "return torch.arange(max(start - 1, 0), max(start - 1, 0) + n_tokens)[None]"), says="too small"),
    Mutant("positions", "Gives one position for the whole pass.", (ARANGE, "return torch.full((1, n_tokens), start)"), says="should give"),
    Mutant("positions", "Counts passes, not tokens.", ("self.length + n_tokens\n        return", "self.length + 1\n        return"), (ARANGE, "return torch.arange(start, start + n_tokens)[None]"), ("T, S, G = q.shape[2], self.length, q", "T, S, G = q.shape[2], self.keys[layer].shape[2], q"), says="should give"),
    Mutant("positions", "Forgets the batch dimension.", ("(start, self.length)[None]", "(start, self.length)"), says="shape"),
    Mutant("positions", "Gives floats.", (ARANGE, "return torch.arange(start, self.length).float()[None]"), says="whole numbers"),
    Mutant("positions", "Makes no object.", code="def KVCache(config, capacity):\n    return None\n", says="must make an object"),
    # cache_decode
    Mutant("cache_decode", "Gives a decoded token a position one too large.", (ARANGE, "return torch.arange(start, self.length)[None] + (start > 0)"), says="too large"),
    Mutant("cache_decode", "Gives a decoded token position 0.", (ARANGE, "return torch.arange(n_tokens)[None]"), says="from 0 again"),
    Mutant("cache_decode", "Maps query heads to KV heads with repeat.", ("self.keys[layer].repeat_interleave(G, dim=1)", "self.keys[layer].repeat(1, G, 1, 1)"), ("self.values[layer].repeat_interleave(G, dim=1)", "self.values[layer].repeat(1, G, 1, 1)"), says="repeat_interleave"),
    Mutant("cache_decode", "Keeps the prompt only.", (APPEND_K, "keys = torch.cat([self.keys[layer], k], dim=2)"), (APPEND_V, "values = torch.cat([self.values[layer], v], dim=2)"), ("T, S, G = q.shape[2], self.length, q", "T, S, G = q.shape[2], self.keys[layer].shape[2], q")),
    Mutant("cache_decode", "Forgets what came before.", (APPEND_K, "self.keys[layer] = k"), (APPEND_V, "self.values[layer] = v"), ("T, S, G = q.shape[2], self.length, q", "T, S, G = q.shape[2], k.shape[2], q"), says="sees nothing"),
    Mutant("cache_decode", "Overwrites the newest token.", (APPEND_K, "self.keys[layer] = torch.cat([self.keys[layer][:, :, :-1], k], dim=2)"), (APPEND_V, "self.values[layer] = torch.cat([self.values[layer][:, :, :-1], v], dim=2)"), ("T, S, G = q.shape[2], self.length, q", "T, S, G = q.shape[2], self.keys[layer].shape[2], q"), says="append"),
    Mutant("cache_decode", "Uses is_causal, which lets one query see the first key only.", (SDPA, "return F.scaled_dot_product_attention(q, keys, values, is_causal=True)"), says="first key"),
    Mutant("cache_decode", "Has no mask in the prefill.", (SDPA, "return F.scaled_dot_product_attention(q, keys, values)"), says="after itself"),
    Mutant("cache_decode", "Stores all layers in one place.", ("if layer == len(self.keys):", "layer = 0\n        if not self.keys:"), ("T, S, G = q.shape[2], self.length, q", "T, S, G = q.shape[2], self.keys[0].shape[2], q"), says="of its own"),
    Mutant("cache_decode", "Exchanges keys and values.", ("self.values.append(v)", "self.values.append(k)"), ("self.keys.append(k)", "self.keys.append(v)"), (APPEND_K, "self.keys[layer] = torch.cat([self.keys[layer], v], dim=2)"), (APPEND_V, "self.values[layer] = torch.cat([self.values[layer], k], dim=2)"), says="exchanged"),
    Mutant("cache_decode", "Puts new tokens in front.", (APPEND_K, "self.keys[layer] = torch.cat([k, self.keys[layer]], dim=2)"), (APPEND_V, "self.values[layer] = torch.cat([v, self.values[layer]], dim=2)"), ("torch.arange(S) <=", "torch.arange(S) + (T == 1) * -S <="), (ARANGE, "return torch.arange(start, self.length)[None] - (start > 0)")),
    Mutant("cache_decode", "Keeps keys and values in the class.", ("self.keys: list[Tensor] = []\n        self.values: list[Tensor] = []", "self.keys, self.values = KVCache.__dict__.get('k', ([], []))\n        KVCache.k = (self.keys, self.values)")),
    Mutant("cache_decode", "Hides the newest token from itself.", ("torch.arange(S) <=", "torch.arange(S) <"), says="sees itself"),
    Mutant("cache_decode", "Takes the first sequence for all.", ("keys = self.keys[layer].repeat", "keys = self.keys[layer][:1].expand_as(self.keys[layer]).repeat")),
    Mutant("cache_decode", "Keeps float32 whatever comes.", ("self.keys.append(k)", "self.keys.append(k.float())"), ("self.values.append(v)", "self.values.append(v.float())"), says="raises"),
    Mutant("cache_decode", "Has room for twelve tokens, then drops the oldest.", ("T, S, G = q.shape[2], self.length, q", "self.keys[layer], self.values[layer] = self.keys[layer][:, :, -12:], self.values[layer][:, :, -12:]\n        T, S, G = min(q.shape[2], 12), self.keys[layer].shape[2], q")),
    Mutant("cache_decode", "Hands the layers their keys in the order of the calls, and starts the count anew too late.", ("if layer == len(self.keys):", "layer = getattr(self, 'calls', 0)\n        self.calls = (layer + 1) % (self.config.n_layers + 1)\n        if layer == len(self.keys):")),
    Mutant("cache_decode", "Attends over the places that are still empty.", code=changed(BLOCK, (":S].repeat", ":].repeat"), ("visible = torch.ones(T, S, dtype=torch.bool).tril(S - T)", "visible = torch.ones(T, self.capacity, dtype=torch.bool).tril(start) if T > 1 else None"))),
    Mutant("cache_decode", "Makes room for one sequence.", code=changed(BLOCK, ("n_layers, B, H", "n_layers, 1, H"))),
    Mutant("cache_decode", "Makes its memory in float32.", code=changed(BLOCK, (", dtype=k.dtype", "")), says="raises"),
    Mutant("cache_decode", "Grows its length in every layer.", code=changed(BLOCK, ("        self.length += n_tokens\n        return torch.arange(self.length - n_tokens, self.length)[None]", "        return torch.arange(self.length, self.length + n_tokens)[None]"), ("start, S = self.length - T, self.length", "start, S = self.length, self.length + T\n        self.length = S"))),
    Mutant("cache_decode", "Grows its length in the first layer only, and reads it in all.", code=changed(BLOCK, ("        self.length += n_tokens\n        return torch.arange(self.length - n_tokens, self.length)[None]", "        return torch.arange(self.length, self.length + n_tokens)[None]"), ("start, S = self.length - T, self.length", "start, S = self.length, self.length + T\n        if layer == 0:\n            self.length = S"))),
    Mutant("cache_decode", "Writes a decoded token over the last one of the prompt.", code=changed(BLOCK, ("start, S = self.length - T, self.length", "start, S = self.length - T, self.length\n        if T == 1 and start:\n            start -= 1"), ("start:S] = torch", "start:start + T] = torch")),),
    Mutant("cache_decode", "Keeps keys that are not turned to their dtype but rounded to bfloat16.", code=changed(BLOCK, ("dtype=k.dtype", "dtype=torch.bfloat16"), ("torch.stack([k, v])", "torch.stack([k, v]).bfloat16()"), ("3 - 1)", "3 - 1).to(q.dtype)"))),
    Mutant("cache_decode", "Forgets the first token of the prompt, as if it were padding.", code=changed(BLOCK, ("tril(S - T)", "tril(S - T)\n        visible[1:, 0] = False"))),
    Mutant("cache_decode", "Makes room for 1,024 tokens at most.", code=changed(BLOCK, ("self.capacity, D, dtype", "min(self.capacity, 1024), D, dtype"))),
    Mutant("cache_decode", "Makes room for the layers of one model.", code=changed(BLOCK, ("self.config.n_layers, B", "30, B"))),
    Mutant("cache_decode", "Makes no object.", code="def KVCache(config, capacity):\n    return None\n", says="must make an object"),
    # cache_chunks
    Mutant("cache_chunks", "Writes every chunk to the beginning.", code=changed(BLOCK, ("start:S] = torch", ":T] = torch"))),
    Mutant("cache_chunks", "Pads a chunk's mask on the wrong side.", code=changed(BLOCK, ("torch.ones(T, S, dtype=torch.bool).tril(S - T)", "F.pad(torch.ones(T, T, dtype=torch.bool).tril(), (0, S - T), value=True)"))),
    Mutant("cache_chunks", "Sees the chunk before, and none before that.", code=changed(BLOCK, ("tril(S - T)", "tril(S - T).triu(S - 2 * T)"))),
    Mutant("cache_chunks", "Rounds chunks up to blocks of 4 and leaves gaps.", code=changed(BLOCK, ("start, S = self.length - T, self.length", "start, S = self.length - T, self.length\n        start = -(-start // 4) * 4 if T > 1 else start"), ("start:S] = torch", "start:start + T] = torch"))),
    Mutant("cache_chunks", "Uses is_causal, whose triangle starts at the first key.", (SDPA, "return F.scaled_dot_product_attention(q, keys, values, is_causal=T > 1)"), says="first key"),
    Mutant("cache_chunks", "Masks nothing once something is cached.", (VISIBLE, "torch.arange(S) <= (torch.arange(S - T, S) if T == S else torch.full((T,), S))[:, None]"), says="after itself"),
    Mutant("cache_chunks", "Starts positions at 0 in every chunk.", (ARANGE, "return torch.arange(n_tokens)[None]"), says="from 0 again"),
    Mutant("cache_chunks", "Keeps the last token of a chunk only.", (APPEND_K, "self.keys[layer] = torch.cat([self.keys[layer], k[:, :, -1:]], dim=2)"), (APPEND_V, "self.values[layer] = torch.cat([self.values[layer], v[:, :, -1:]], dim=2)"), ("T, S, G = q.shape[2], self.length, q", "T, S, G = q.shape[2], self.keys[layer].shape[2], q")),
    Mutant("cache_chunks", "Gives a chunk the position of its first token.", (ARANGE, "return torch.arange(start, start + 1)[None].expand(1, n_tokens) + (start == 0) * torch.arange(n_tokens)")),
    Mutant("cache_chunks", "Takes any later pass for a decode step.", (VISIBLE, "torch.ones(T, S, dtype=torch.bool).tril(0 if T == S else S - 1)"), says="after itself"),
    Mutant("cache_chunks", "Is off by one in a later chunk.", (VISIBLE, "torch.arange(S) <= torch.arange(S - T, S)[:, None] - int(T < S and T > 1)"), says="itself"),
    Mutant("cache_chunks", "Lets a token of a later chunk see one too far.", (VISIBLE, "torch.arange(S) <= torch.arange(S - T, S)[:, None] + int(T < S)")),
    Mutant("cache_chunks", "Forgets the first chunk when the third comes.", (APPEND_K, "old, self.keys[layer] = self.keys[layer], torch.cat([self.keys[layer], k], dim=2)"), ("visible = ", "skip = 0 if S - T < 4 else 2\n        visible = (torch.arange(S) >= skip) & ("), ("torch.arange(S - T, S)[:, None]  #", "torch.arange(S - T, S)[:, None])  #")),
    Mutant("cache_chunks", "Makes no object.", code="def KVCache(config, capacity):\n    return None\n", says="must make an object"),
    # cache_full
    Mutant("cache_full", "Never refuses.", (f"        {CHECK}\n            {REFUSE}\n", ""), says="ValueError"),
    Mutant("cache_full", "Refuses one token too early.", (" > self.capacity:", " >= self.capacity:"), says="must hold 6"),
    Mutant("cache_full", "Refuses one token too late.", (" > self.capacity:", " > self.capacity + 1:"), says="ValueError"),
    Mutant("cache_full", "Counts the tokens before it refuses.", (f"        {CHECK}\n", "        self.length += n_tokens\n        if self.length > self.capacity:\n"), ("start, self.length = self.length, self.length + n_tokens", "start = self.length - n_tokens")),
    Mutant("cache_full", "Empties itself when it is full.", (f"            {REFUSE}\n", f"            self.length, self.keys, self.values = 0, [], []\n            {REFUSE}\n")),
    Mutant("cache_full", "Starts again from the left when it is full.", (REFUSE, "self.length, self.keys, self.values = 0, [], []"), says="ValueError"),
    Mutant("cache_full", "Returns None when it is full.", (REFUSE, "return None"), says="whole numbers"),
    Mutant("cache_full", "Drops the oldest token when it is full.", (REFUSE, "n = self.length + n_tokens - self.capacity\n            self.length -= n\n            self.keys = [x[:, :, n:] for x in self.keys]\n            self.values = [x[:, :, n:] for x in self.values]")),
    Mutant("cache_full", "Raises another kind of exception.", ("raise ValueError(", "raise KeyError("), says="KeyError"),
    Mutant("cache_full", "Refuses when the last layer is written.", (f"        {CHECK}\n            {REFUSE}\n", ""), ("T, S, G = q.shape[2], self.length, q", "if self.length > self.capacity:\n            raise ValueError('full')\n        T, S, G = q.shape[2], self.length, q")),
    Mutant("cache_full", "Stops the program with an assert.", (f"        {CHECK}\n            {REFUSE}\n", "        assert self.length + n_tokens <= self.capacity\n"), says="AssertionError"),
    Mutant("cache_full", "Writes what fits and drops the rest.", code=changed(BLOCK, ('            raise ValueError("full")\n', "            n_tokens = self.capacity - self.length\n"))),
    Mutant("cache_full", "Wraps around to the first place.", code=changed(BLOCK, ('        if self.length + n_tokens > self.capacity:\n            raise ValueError("full")\n', "        self.length %= self.capacity\n"))),
    Mutant("cache_full", "Grows in silence.", code=changed(BLOCK, ('            raise ValueError("full")\n', "            grown = torch.zeros(*self.store.shape[:4], n_tokens, self.store.shape[5]) if self.store is not None else None\n            self.store = torch.cat([self.store, grown], 4) if grown is not None else None\n            self.capacity += n_tokens\n"))),
    Mutant("cache_full", "Makes no object.", code="def KVCache(config, capacity):\n    return None\n", says="must make an object"),
    # kv_bytes_per_token
    Mutant("kv_bytes_per_token", "Stores keys alone.", ("return 2 * config", "return config"), says="twice"),
    Mutant("kv_bytes_per_token", "Stores every query head.", ("n_kv_heads", "n_heads"), says="query heads"),
    Mutant("kv_bytes_per_token", "Counts one layer.", ("config.n_layers * ", ""), says="layer"),
    Mutant("kv_bytes_per_token", "Takes heads for layers.", ("config.n_layers", "config.n_heads"), says="counts heads"),
    Mutant("kv_bytes_per_token", "Takes the width of the model.", ("config.n_kv_heads * config.head_dim", "config.d_model")),
    Mutant("kv_bytes_per_token", "Knows 16 bits only.", ("* element_bytes", "* 2"), says="bytes of an element"),
    # largest_batch
    Mutant("largest_batch", "Forgets the weights.", ("free = memory - config.parameter_count * weight_bytes", "free = memory"), says="weights"),
    Mutant("largest_batch", "Rounds up.", ("int(free // a_user)", "-int(-free // a_user)"), says="round down"),
    Mutant("largest_batch", "Gives a part of a user.", ("int(free // a_user)", "free / a_user"), says="whole"),
    Mutant("largest_batch", "Goes below 0.", ("max(0, int(free // a_user))", "int(free / a_user)"), says="0 users"),
    Mutant("largest_batch", "Leaves the input embedding out.", ("- config.parameter_count", "- config.streamed_params")),
    Mutant("largest_batch", "Stores every query head.", ("n_kv_heads", "n_heads"), says="query heads"),
    Mutant("largest_batch", "Forgets the context.", ("context * 2", "2"), says="context"),
    Mutant("largest_batch", "Keeps at least one user.", ("max(0,", "max(1,")),
    Mutant("largest_batch", "Stores keys and values in the precision of the weights.", ("* element_bytes", "* weight_bytes")),
    Mutant("largest_batch", "Takes bytes for binary gigabytes.", ("free = memory -", "free = memory / 1e9 * 2**30 -")),
    # predict_speedup
    Mutant("predict_speedup", "Compares FLOPs alone.", (STEP_NAIVE, "naive += (2 * P * i + 4 * A * L * i * i) / peak"), (STEP_CACHED, "cached += (2 * P + 4 * A * L * i) / peak"), says="FLOPs alone"),
    Mutant("predict_speedup", "Compares bytes alone.", (STEP_NAIVE, "naive += weights / bandwidth"), (STEP_CACHED, "cached += (weights + a_token * i) / bandwidth"), says="bytes alone"),
    Mutant("predict_speedup", "Compares the last step.", (STEP_NAIVE, STEP_NAIVE.replace("+=", "=")), (STEP_CACHED, STEP_CACHED.replace("+=", "=")), says="last step"),
    Mutant("predict_speedup", "Adds the two limits.", (STEP_NAIVE, "naive += (2 * P * i + 4 * A * L * i * i) / peak + weights / bandwidth"), (STEP_CACHED, "cached += (2 * P + 4 * A * L * i) / peak + (weights + a_token * i) / bandwidth"), says="both"),
    Mutant("predict_speedup", "Has it upside down.", ("naive / cached", "cached / naive"), says="upside down"),
    Mutant("predict_speedup", "Forgets keys and values.", ("weights + a_token * i", "weights")),
    Mutant("predict_speedup", "Lets attention grow in a straight line without a cache.", ("A * L * i * i", "A * L * i")),
    Mutant("predict_speedup", "Knows 16 bits only.", ("weights = P * element_bytes", "weights = P * 2")),
    Mutant("predict_speedup", "Takes a step with a cache to be bound by memory always.", (STEP_CACHED, "cached += (weights + a_token * i) / bandwidth")),
    Mutant("predict_speedup", "Forgets attention's FLOPs in a step with a cache.", ("2 * P + 4 * A * L * i)", "2 * P)")),
    Mutant("predict_speedup", "Counts the input embedding as work.", ("P, A, L = config.matmul_params", "P, A, L = config.parameter_count")),
    Mutant("predict_speedup", "Takes half of n.", ("return naive / cached", "return n / 2")),
    # speedup_guesses
    Mutant("speedup_guesses", "Takes the ratio of FLOPs on both.", ("return 27.0, 1.0", "return 257.0, 100.0"), says="On the CPU"),
    Mutant("speedup_guesses", "Thinks that a cache always pays.", ("27.0, 1.0", "27.0, 3.0"), says="On the H100"),
    Mutant("speedup_guesses", "Thinks that it gains nothing on a CPU.", ("27.0, 1.0", "1.0, 1.0"), says="On the CPU"),
    Mutant("speedup_guesses", "Gives one number.", ("27.0, 1.0", "27.0"), says="two numbers"),
    Mutant("speedup_guesses", "Exchanges the machines.", ("27.0, 1.0", "1.0, 27.0"), says="On the CPU"),
    Mutant("speedup_guesses", "Gives a number beyond all measure.", ("27.0, 1.0", "10**400, 1.0"), says="On the CPU"),
    Mutant("speedup_guesses", "Gives a number below all measure.", ("27.0, 1.0", "27.0, -(10**400)"), says="On the H100"),
    # found by an adversary
    Mutant("largest_batch", "Takes half a byte of a weight for one.", ("config.parameter_count * weight_bytes", "config.parameter_count * max(1, int(weight_bytes))")),
    Mutant("largest_batch", "Takes half a byte of a key for one.", ("config.head_dim * element_bytes", "config.head_dim * max(1, int(element_bytes))")),
    Mutant("predict_speedup", "Reads keys and values without a cache too.", (STEP_NAIVE, STEP_NAIVE.replace("weights / bandwidth", "(weights + a_token * i) / bandwidth")), says="no keys"),
]  # fmt: skip
