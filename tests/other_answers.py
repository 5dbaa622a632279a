"""Right answers that look nothing like the solutions: other layouts, other libraries, other arithmetic. Each must pass."""

PREALLOCATED = '''
import torch


class KVCache:
    """One block of memory for all layers, laid out (L, B, capacity, Hkv, D), of the dtype that comes."""

    def __init__(self, config, capacity):
        self.L, self.capacity, self.length, self.store = config.n_layers, capacity, 0, None

    def positions(self, n_tokens):
        if self.length + n_tokens > self.capacity:
            raise ValueError("full")
        self.length += n_tokens
        return torch.arange(self.length - n_tokens, self.length).unsqueeze(0)

    def attend(self, layer, q, k, v):
        B, H, T, D = k.shape
        if self.store is None:
            self.store = torch.full((2, self.L, B, self.capacity, H, D), float("nan"), dtype=k.dtype)
        start, S = self.length - T, self.length
        self.store[0, layer, :, start:S] = k.transpose(1, 2)
        self.store[1, layer, :, start:S] = v.transpose(1, 2)
        k, v = (x[layer, :, :S].transpose(1, 2) for x in self.store)  # (B, Hkv, S, D)
        q = q.view(B, H, -1, T, D)  # (B, Hkv, G, T, D)
        scores = (q @ k[:, :, None].transpose(-1, -2)).float() * D**-0.5
        scores = scores + torch.full((T, S), float("-inf")).triu(S - T + 1)
        return (scores.softmax(-1).to(v.dtype) @ v[:, :, None]).flatten(1, 2)
'''

TOKEN_BY_TOKEN = '''
import torch


class KVCache:
    """A list of tokens a layer, keys copied for each query head; the length grows in attend; refuses with MinillmError."""

    def __init__(self, config, capacity):
        self.config, self.capacity = config, capacity
        self.tokens = [[] for _ in range(config.n_layers)]

    def positions(self, n_tokens):
        from minillm.errors import MinillmError

        seen = len(self.tokens[-1])
        if seen + n_tokens > self.capacity:
            raise MinillmError("no room")
        return torch.tensor([list(range(seen, seen + n_tokens))])

    def attend(self, layer, q, k, v):
        G = self.config.n_heads // self.config.n_kv_heads
        heads = [h // G for h in range(self.config.n_heads)]
        out = []
        for t in range(q.shape[2]):
            self.tokens[layer].append((k[:, heads, t], v[:, heads, t]))
            keys = torch.stack([key for key, _ in self.tokens[layer]], 2)
            values = torch.stack([value for _, value in self.tokens[layer]], 2)
            weights = (torch.einsum("bhd,bhsd->bhs", q[:, :, t], keys) / q.shape[-1] ** 0.5).softmax(-1)
            out.append(torch.einsum("bhs,bhsd->bhd", weights, values))
        return torch.stack(out, 2)
'''

PACKAGE_PARTS = '''
import torch
from minillm.stages.naive import causal_attention


class KVCache:
    """With the package's own attention, and a key and value for each query head."""

    def __init__(self, config, capacity):
        self.group, self.capacity, self.keys, self.values = config.group_size, capacity, {}, {}
        self.length = 0

    def positions(self, n_tokens):
        assert n_tokens > 0
        if not self.length + n_tokens <= self.capacity:
            raise ValueError
        self.length += n_tokens
        return torch.arange(self.length)[None, -n_tokens:]

    def attend(self, layer, q, k, v):
        new = {"keys": k, "values": v}
        for name, x in new.items():
            store, x = getattr(self, name), x.repeat_interleave(self.group, 1)
            store[layer] = torch.cat((store[layer], x), -2) if layer in store else x
        return causal_attention(q, self.keys[layer], self.values[layer])
'''

CHAPTER_0 = """
import math

import numpy as np


def ttft(start, tokens):
    return min(tokens) - start


def itl(tokens):
    return tuple(tokens[i + 1] - tokens[i] for i in range(len(tokens) - 1))


def tpot(start, tokens):
    gaps = np.diff(tokens)
    return gaps.mean() if gaps.size else None


def p99_interpolated(values):
    return np.percentile(values, 99)


def p99_nearest(values):
    return sorted(values)[min(int(len(values) * 0.99), len(values) - 1)]


def usd_per_million(price_per_hour, tokens_per_s, busy=1.0):
    return 277.77777777778 * price_per_hour / tokens_per_s / busy


def linear_intensity(rows, d_in, d_out, weight_bytes=2.0, activation_bytes=2.0):
    return 2 / (weight_bytes / rows + activation_bytes / d_in + activation_bytes / d_out)


def ridge(peak, bandwidth):
    return np.float64(peak) / bandwidth


def attainable(intensity, peak, bandwidth):
    return peak if intensity > peak / bandwidth else bandwidth * intensity


def binding_limit(flops, moved, operators, peak, bandwidth, overhead):
    c, m, o = flops / peak, moved / bandwidth, operators * overhead
    if c >= m and c >= o:
        return "compute"
    return "memory" if m >= o else "overhead"


def decode_seconds(config, bandwidth, bytes_per_weight=2.0):
    return config.matmul_params * bytes_per_weight / bandwidth


def decode_guess_ms():
    return 7.4


def step_intensity(config, batch, context, element_bytes=2.0):
    L, A = config.n_layers, config.n_heads * config.head_dim
    flops = 2 * batch * (config.matmul_params + 2 * A * L * context)
    kv = 2 * L * A // config.group_size * context * batch
    return flops / element_bytes / (config.matmul_params + kv)


def step_intensity_limit(config, context, element_bytes=2.0):
    return step_intensity(config, 10**12, context, element_bytes)
"""

CHAPTER_1 = """
import math

import numpy as np
import torch
import torch.nn.functional as F


def causal_attention(q, k, v):
    T, S = q.shape[2], k.shape[2]
    bias = torch.zeros(T, S, dtype=q.dtype).masked_fill(torch.ones(T, S).triu(S - T + 1).bool(), -1e30)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def rope(x, positions, theta=10_000.0):
    real, imaginary = x.float().chunk(2, dim=-1)
    exponents = torch.arange(0, x.shape[-1], 2) / x.shape[-1]
    turn = torch.polar(torch.tensor(1.0), positions[:, None, :, None] / theta**exponents)
    turned = torch.complex(real, imaginary) * turn
    return torch.cat([turned.real, turned.imag], -1).type_as(x)


def greedy(logits):
    return logits.sort(-1, descending=True).indices[:, 0]  # of stride V, for a single row too


def top_p(logits, p):
    out = torch.zeros_like(logits, dtype=torch.float32)
    for row, scores in enumerate(logits.double().softmax(-1)):
        mass = 0.0
        for token in scores.argsort(descending=True).tolist():
            if mass >= p and mass > 0:
                break
            mass += scores[token].item()
            out[row, token] = scores[token]
        out[row] /= mass
    return out


def draw(probabilities, seed):
    rng = np.random.default_rng(seed)
    noise = torch.from_numpy(rng.exponential(size=probabilities.shape))
    return (probabilities / noise).argmax(-1)


def generate(forward, prompt, max_new_tokens, stop_tokens=()):
    tokens, new = torch.tensor(prompt)[None], []
    while len(new) < max_new_tokens:
        new.append(forward(tokens)[:, -1].argmax(-1))
        tokens = torch.cat([tokens, new[-1][None]], 1)
        if new[-1].item() in set(stop_tokens):
            break
    return torch.cat(new)


def naive_flops(config, prompt_tokens, new_tokens):
    total = 0
    for i in range(prompt_tokens, prompt_tokens + new_tokens):
        total += 2 * config.matmul_params * i + 4 * config.n_heads * config.head_dim * config.n_layers * i**2
    return total


def crossover(config):
    n = 1
    while config.matmul_params > 4 / 3 * config.n_heads * config.head_dim * config.n_layers * n:
        n += 1
    return n
"""

CHAPTER_2 = """
import math

import numpy as np


def kv_bytes_per_token(config, element_bytes=2.0):
    return config.kv_bytes_per_token(1) * element_bytes


def largest_batch(config, memory, context, weight_bytes=2.0, element_bytes=2.0):
    users, user = 0, context * config.kv_bytes_per_token(1) * element_bytes
    while config.parameter_count * weight_bytes + (users + 1) * user <= memory:
        users += 1
    return users


def predict_speedup(config, n, peak, bandwidth, element_bytes=2.0):
    i = np.arange(n) + 1.0
    P, AL = config.streamed_params, config.n_heads * config.head_dim * config.n_layers
    naive = np.maximum((2 * P * i + 4 * AL * i**2) / peak, P * element_bytes / bandwidth)
    read = (P + config.kv_bytes_per_token(1) * (i - 1)) * element_bytes / bandwidth
    return naive.sum() / np.maximum((2 * P + 4 * AL * i) / peak, read).sum()


def speedup_guesses():
    return [25, 1.1]
"""

CHAPTER_3 = """
import math

import numpy as np
import torch
import torch.nn.functional as F

from minillm.roofline.counting import count


def bytes_moved(function, *args):
    return count(lambda: getattr(function, "attend", function)(*args)).bytes


def head_map(n_heads, n_kv_heads):
    return torch.arange(n_kv_heads).repeat_interleave(n_heads // n_kv_heads)


def pool_heads(weight, head_dim, n_kv_heads):
    heads = weight.split(head_dim)
    G, rest = divmod(len(heads), n_kv_heads)
    if rest or not G:
        raise ValueError("no")
    return torch.cat([sum(heads[i : i + G]) / G for i in range(0, len(heads), G)])


def tokens_that_fit(config, memory, element_bytes=2.0):
    Hq, latent = config["num_attention_heads"], config.get("kv_lora_rank")
    D = config.get("head_dim") or config["hidden_size"] / Hq
    a_layer = latent + config["qk_rope_head_dim"] if latent else 2 * D * config.get("num_key_value_heads", Hq)
    return math.floor(memory / element_bytes / a_layer / config["num_hidden_layers"] + 1e-9)


def attention_intensity(n_heads, n_kv_heads, context, new_tokens=1, element_bytes=2.0):
    G, S, T = n_heads / n_kv_heads, context, new_tokens
    return np.float64(2 / element_bytes) / (1 / (G * T) + 1 / S)


def sharing_guesses():
    return [1.04, 1.8, 4000]
"""

# Grouped attention with its scores written out, a cache that grows with every token, latents joined with keys.
MANUAL = """
def grouped_attention(q, k, v):
    (B, Hq, T, D), (Hkv, S) = q.shape, k.shape[1:3]
    q = q.view(B, Hkv, Hq // Hkv, T, D) * D**-0.5
    bias = torch.full((T, S), float("-inf"), dtype=q.dtype).triu(S - T + 1)
    weights = (torch.einsum("bkgtd,bksd->bkgts", q, k) + bias).softmax(-1)
    return torch.einsum("bkgts,bksd->bkgtd", weights, v).flatten(1, 2)


class GroupedKVCache:
    def __init__(self, config, capacity):
        self.capacity, self.length, self.layers = capacity, 0, {}

    def positions(self, n_tokens):
        from minillm.errors import MinillmError

        if self.length + n_tokens > self.capacity:
            raise MinillmError("full")
        self.length += n_tokens
        return torch.arange(self.length - n_tokens, self.length).unsqueeze(0)

    def attend(self, layer, q, k, v):
        new = torch.stack([k, v])
        self.layers[layer] = torch.cat([self.layers[layer], new], 3) if layer in self.layers else new
        return grouped_attention(q, *self.layers[layer])


def absorbed_mla(q_nope, q_rope, latents, k_rope, w_uk, w_uv):
    keys = torch.cat([latents, k_rope], -1)
    q = torch.cat([torch.einsum("bhn,hnc->bhc", q_nope, w_uk), q_rope], -1)
    weights = (torch.einsum("bhc,bsc->bhs", q, keys) / math.sqrt(q_nope.shape[2] + q_rope.shape[2])).softmax(2)
    return (w_uv @ (weights @ latents)[..., None])[..., 0]
"""

# A KV head at a time; a cache laid out (B, capacity, Hkv, D) for each layer; latents as keys and values of a fused kernel.
HEAD_BY_HEAD = """
def grouped_attention(q, k, v):
    T, S, G = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    visible = (torch.arange(S) <= torch.arange(S - T, S)[:, None]).repeat(G, 1)
    out = []
    for h in range(k.shape[1]):
        rows = q[:, G * h : G * h + G].flatten(1, 2)  # (B, G*T, D)
        scores = rows @ k[:, h].transpose(1, 2) / math.sqrt(q.shape[3])
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        out.append((weights @ v[:, h]).unflatten(1, (G, T)))
    return torch.cat(out, 1)


class GroupedKVCache:
    def __init__(self, config, capacity):
        self.capacity, self.length, self.keys, self.values = capacity, 0, {}, {}

    def positions(self, n_tokens):
        start, self.length = self.length, self.length + n_tokens
        if self.length > self.capacity:
            raise ValueError("full")
        return torch.arange(start, self.length)[None]

    def attend(self, layer, q, k, v):
        (B, Hkv, T, D), S = k.shape, self.length
        for store, new in ((self.keys, k), (self.values, v)):
            if layer not in store:
                store[layer] = torch.full((B, self.capacity, Hkv, D), float("nan"), dtype=k.dtype)
            store[layer][:, S - T : S] = new.transpose(1, 2)
        return grouped_attention(q, *(x[layer][:, :S].transpose(1, 2) for x in (self.keys, self.values)))


def absorbed_mla(q_nope, q_rope, latents, k_rope, w_uk, w_uv):
    q = torch.cat([(q_nope[:, :, None] @ w_uk)[:, :, 0], q_rope], -1)[:, None]  # (B, 1, Hq, d_c + d_r)
    keys = torch.cat([latents, k_rope], -1)[:, None]
    out = F.scaled_dot_product_attention(q, keys, keys, scale=(q_nope.shape[2] + q_rope.shape[2]) ** -0.5)[:, 0]
    return torch.einsum("bhc,hvc->bhv", out[..., : latents.shape[2]], w_uv)
"""

# What PyTorch shares by itself, and the package's own cache.
PACKAGE = """
def grouped_attention(q, k, v):
    T, S = q.shape[2], k.shape[2]
    if T == 1:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    visible = torch.ones(T, S, dtype=torch.bool).tril(S - T)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)


class GroupedKVCache:
    def __init__(self, config, capacity):
        from types import SimpleNamespace

        self.make = lambda k: SimpleNamespace(config=config, device=k.device, dtype=k.dtype)
        self.capacity, self.length, self.inner = capacity, 0, None

    def positions(self, n_tokens):
        if self.length + n_tokens > self.capacity:
            raise ValueError("full")
        self.length += n_tokens
        return torch.arange(self.length)[None, -n_tokens:]

    def attend(self, layer, q, k, v):
        from minillm.stages import gqa

        self.inner = self.inner or gqa.GroupedKVCache(self.make(k), self.capacity, k.shape[0])
        self.inner.length = self.length
        return self.inner.attend(layer, q, k, v)


def absorbed_mla(q_nope, q_rope, latents, k_rope, w_uk, w_uv):
    from minillm.stages import mla

    q, up = torch.cat([q_nope, q_rope], -1), torch.cat([w_uk, w_uv], 1)
    return mla.absorbed_attention(q[:, :, None], torch.cat([latents, k_rope], -1)[:, None], up, w_uk.shape[1])[:, :, 0]
"""

CHAPTER_4 = """
import math
from itertools import accumulate

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence


def pad_prompts(prompts):
    backwards = pad_sequence([torch.tensor(prompt).flip(0) for prompt in prompts], batch_first=True)
    return backwards.flip(1), backwards.shape[1] - torch.tensor([len(prompt) for prompt in prompts])


def padded_positions(pads, start, n_tokens):
    real = torch.arange(start + n_tokens) >= pads[:, None]
    return (real.cumsum(1) - 1).masked_fill(~real, 1)[:, start:].int()


def padding_mask(pads, start, n_tokens):
    S = start + n_tokens
    mask = torch.ones(len(pads), S, S, dtype=torch.bool).tril()
    for row, pad in enumerate(pads.tolist()):
        mask[row, pad:, :pad] = False
        mask[row, :pad] = True
    return mask[:, start:]


def static_loop(step, prompts, limits, stop_tokens):
    left, columns, tokens, lengths = np.array(limits), [], prompts, np.array(limits)
    while (left > 0).any():
        new = step(tokens)
        columns.append(new.tolist())
        hit = np.array([token in stops for token, stops in zip(columns[-1], stop_tokens)])
        lengths[hit & (left > 0)] = len(columns)
        left = np.where(hit, 0, left - 1)
        tokens = new.unsqueeze(-1).masked_fill(torch.from_numpy(left <= 0)[:, None], 0)
    return [torch.tensor(answer[:n]) for answer, n in zip(zip(*columns), lengths)]


class Scheduler:
    def __init__(self, max_batch, max_tokens):
        self.slots, self.room, self.queue = [None] * max_batch, max_tokens, []

    def submit(self, name, prompt_tokens, max_new_tokens):
        from minillm.errors import UsageError

        size = prompt_tokens + max_new_tokens - 1
        if size > self.room:
            raise UsageError("never")
        self.queue = [*self.queue, (name, size)]

    def step(self, finished):
        self.slots = [None if slot is None or slot[0] in finished else slot for slot in self.slots]
        for i, slot in enumerate(self.slots):
            used = sum(slot[1] for slot in self.slots if slot)
            if slot is None and self.queue and used + self.queue[0][1] <= self.room:
                self.slots[i], *self.queue = self.queue
        return {slot[0] for slot in self.slots if slot}


def step_seconds(config, new, seen, peak, bandwidth, element_bytes=2.0):
    P, each = config.streamed_params, [config.kv_bytes_per_token(1) * element_bytes / bandwidth * S for S in seen]
    return np.maximum(2 * P * sum(new) / peak, P * element_bytes / bandwidth) + sum(each)


def batch_at_ridge(config, context, peak, bandwidth, weight_bytes=2.0, element_bytes=2.0):
    P, A, L = config.matmul_params, config.n_heads * config.head_dim, config.n_layers
    for B in range(1, 20_000):
        moved = P * weight_bytes + B * context * config.kv_bytes_per_token(1) * element_bytes
        if B * (2 * P + 4 * A * L * context) / moved >= peak / bandwidth:
            return B


def users_that_fit(config, memory, requests, weight_bytes=2.0, element_bytes=2.0):
    free = memory - config.parameter_count * weight_bytes
    bytes_of = [(sum(request) - 1) * config.kv_bytes_per_token(1) * element_bytes for request in requests]
    slots = [n for n in range(len(requests) + 1) if n * max(bytes_of) <= max(free, 0)]
    return np.array([slots[-1], sum(total <= free for total in accumulate(bytes_of))]).tolist()


def batch_guesses():
    return [9, 21]
"""

# With a mask of the package's kind, and lists that shrink.
CHAPTER_4_LISTS = """
import math

import torch

from minillm.roofline.ceilings import Ceilings
from minillm.workload import step_law


def pad_prompts(prompts):
    T, B = max(map(len, prompts)), len(prompts)
    tokens = torch.full((B, T), prompts[0][0], dtype=torch.int32)
    for row, prompt in enumerate(prompts):
        for back, token in enumerate(reversed(prompt), 1):
            tokens[row, -back] = token
    return [tokens, torch.tensor([T - len(prompt) for prompt in prompts], dtype=torch.int32)]


def padded_positions(pads, start, n_tokens):
    return torch.tensor([[abs(j - pad) for j in range(start, start + n_tokens)] for pad in pads.tolist()])


def padding_mask(pads, start, n_tokens):
    S = start + n_tokens

    def sees(pad, i, j):
        return pad <= j <= i if i >= pad else j < S

    return torch.tensor([[[sees(pad, i, j) for j in range(S)] for i in range(start, S)] for pad in pads.tolist()])


def static_loop(step, prompts, limits, stop_tokens):
    answers, running, tokens = {b: [] for b in range(len(limits))}, set(range(len(limits))), prompts
    while running:
        tokens = step(tokens).reshape(-1, 1)
        for b in sorted(running):
            answers[b].append(tokens[b, 0].item())
        running = {b for b in running if len(answers[b]) < limits[b] and answers[b][-1] not in stop_tokens[b]}
    return tuple(answers.values())


class Scheduler:
    def __init__(self, max_batch, max_tokens):
        self.max_batch, self.max_tokens, self.need, self.done, self.admitted = max_batch, max_tokens, {}, set(), 0

    def submit(self, name, prompt_tokens, max_new_tokens):
        if not prompt_tokens + max_new_tokens <= self.max_tokens + 1:
            raise ValueError
        self.need[name] = prompt_tokens + max_new_tokens - 1

    def step(self, finished):
        self.done |= set(finished)
        names = list(self.need)
        while self.admitted < len(names):
            running = [name for name in names[: self.admitted + 1] if name not in self.done]
            if len(running) > self.max_batch or sum(self.need[name] for name in running) > self.max_tokens:
                break
            self.admitted += 1
        return tuple(name for name in names[: self.admitted] if name not in self.done)


def step_seconds(config, new, seen, peak, bandwidth, element_bytes=2.0):
    dtype = {2.0: "bf16", 4.0: "fp32"}.get(element_bytes, "bf16")
    scale = 1 if dtype == "fp32" else element_bytes / 2
    return step_law(config, Ceilings("", dtype, bandwidth / scale, peak, 0.0))(sum(new), seen)


def batch_at_ridge(config, context, peak, bandwidth, weight_bytes=2.0, element_bytes=2.0):
    flops = 2 * config.matmul_params + 4 * config.n_heads * config.head_dim * config.n_layers * context
    gain = flops - peak / bandwidth * context * config.kv_bytes_per_token(1) * element_bytes
    return -(-(peak / bandwidth * config.matmul_params * weight_bytes) // gain) if gain > 0 else None


def users_that_fit(config, memory, requests, weight_bytes=2.0, element_bytes=2.0):
    room = (memory - config.parameter_count * weight_bytes) / config.kv_bytes_per_token(1) / element_bytes
    if room < 0:
        return 0, 0
    users, left = 0, room
    while users < len(requests) and left >= sum(requests[users]) - 1:
        left -= sum(requests[users]) - 1
        users += 1
    return float(min(len(requests), math.floor(room / max(p + n - 1 for p, n in requests)))), users


def batch_guesses():
    return 9.17, 19.8
"""

# A loop over rows in float64, zeros from the largest weight, products group by group.
CHAPTER_5 = """
import math

import numpy as np
import torch


def absmax_quantize(w):
    codes, scales = torch.zeros(w.shape, dtype=torch.int8), torch.empty(len(w), 1)
    for i, row in enumerate(w.tolist()):
        scales[i] = max(map(abs, row)) / 127 or 1e-30
        codes[i] = torch.tensor([round(x / scales[i].item()) for x in row])
    return codes, scales


def zeropoint_quantize(w, group_size):
    from minillm.errors import UsageError

    groups, rest = divmod(w.shape[1], group_size)
    if rest or not groups:
        raise UsageError("no")
    x = w.double().reshape(-1, group_size)
    high = x.max(1).values
    s = (high - x.min(1).values) / 15
    s[s == 0] = 1e-3
    z = high - 7 * s
    z[x.min(1).values == high] = high[x.min(1).values == high]
    codes = torch.floor((x - z[:, None]) / s[:, None] + 8.5).clamp(0, 15).byte()
    return codes.reshape(w.shape), s.reshape(-1, groups), z.reshape(-1, groups)


def pack_nibbles(codes):
    return (codes.reshape(len(codes), -1, 2).int() * torch.tensor([16, 1])).sum(2).byte()


def unpack_nibbles(packed):
    codes = torch.empty(len(packed), 2 * packed.shape[1], dtype=torch.uint8)
    codes[:, ::2], codes[:, 1::2] = packed // 16, packed % 16
    return codes


def groupwise_matmul(x, codes, scales, zeros):
    g = codes.shape[1] // scales.shape[1]
    out = 0
    for i, part in enumerate(x.float().split(g, dim=1)):
        q = codes[:, i * g : i * g + g].int() - 8
        out = out + part @ q.float().T * scales[:, i] + part.sum(1, keepdim=True) * zeros[:, i]
    return out.to(x.dtype)


def error_bound(x, scales):
    s = np.repeat(scales.numpy(), x.shape[1] // scales.shape[1], axis=1)
    return np.einsum("mk,nk->mn", np.abs(x.numpy()), s / 2)


def quantize_kv(x, axis):
    if axis == "channel":
        codes, scales = quantize_kv(x.transpose(2, 3), "token")
        return codes.transpose(2, 3), scales.transpose(2, 3)
    codes, scales = absmax_quantize(x.flatten(0, 2))
    return codes.reshape(x.shape), scales.reshape(*x.shape[:3], 1)


def bits_per_weight(bits, group_size, scale_bits=16.0, zero_bits=16.0):
    return np.float64(bits * group_size + scale_bits + zero_bits) / group_size


def step_bytes(config, batch, context, weight_bits=16.0, kv_bits=16.0):
    return config.matmul_params * weight_bits / 8 + batch * context * config.kv_bytes_per_token(1) * kv_bits / 8


def weight_only_gain(config, batch, context, peak, bandwidth, weight_bits):
    kv = step_bytes(config, batch, context) - step_bytes(config, 0, context)
    seconds = []
    for bits in (16, weight_bits):
        linear = np.maximum(2 * batch * config.matmul_params / peak, config.streamed_params * bits / 8 / bandwidth)
        seconds.append(linear + kv / bandwidth)
    return seconds[0] / seconds[1]


def gain_ends(peak, bandwidth, weight_bits):
    first = 0
    while 2 * (first + 1) / peak <= weight_bits / 8 / bandwidth:
        first += 1
    second = first + 1
    while 2 * second / peak < 2 / bandwidth:
        second += 1
    return [first, second]


def quantized_guesses():
    return 308, 494, 1.24
"""

# Cells of equal width in place of points: half a step is lost at the ends. And what the package has.
CHAPTER_5_CELLS = """
import math

import torch
import torch.nn.functional as F

from minillm.stages import quantizers


def absmax_quantize(w):
    codes, scales = quantizers.absmax_int8(w.contiguous())
    return codes, scales.float()


def zeropoint_quantize(w, group_size):
    if w.shape[1] % group_size:
        raise ValueError
    groups = w.float().reshape(len(w), -1, group_size)
    low, width = groups.min(2, keepdim=True)[0], groups.max(2, keepdim=True)[0] - groups.min(2, keepdim=True)[0]
    s = (width / 16).clamp_min(1e-35)
    codes = ((groups - low) / s).floor().clamp(0, 15)
    z = torch.where(width > 0, low + 8.5 * s, low + 8 * s)
    return codes.byte().reshape(w.shape), s[..., 0], z[..., 0]


def pack_nibbles(codes):
    return quantizers.pack_nibbles(codes)


def unpack_nibbles(packed):
    table = torch.cartesian_prod(torch.arange(16), torch.arange(16)).byte()
    return table[packed.int()].reshape(len(packed), -1)


def groupwise_matmul(x, codes, scales, zeros):
    return F.linear(x, quantizers.dequantize_int4(codes, scales, zeros).type_as(x))


def error_bound(x, scales):
    each = F.avg_pool1d(x.abs()[None], x.shape[1] // scales.shape[1])[0]
    return F.linear(each, scales) * (x.shape[1] // scales.shape[1] / 2)


def quantize_kv(x, axis):
    dim = {"token": -1, "channel": -2}[axis]
    x = x.double()
    s = (x.abs().amax(dim, keepdim=True) / 127.5).clamp_min(1e-30)
    return (x / s).round().clamp(-127, 127).char(), s


def bits_per_weight(bits, group_size, scale_bits=16.0, zero_bits=16.0):
    return bits + scale_bits / group_size + zero_bits / group_size


def step_bytes(config, batch, context, weight_bits=16.0, kv_bits=16.0):
    linear = config.n_layers * config.layer_matmul_params + config.vocab_size * config.d_model
    return 0.125 * (weight_bits * linear + kv_bits * batch * context * config.kv_bytes_per_token(1))


def weight_only_gain(config, batch, context, peak, bandwidth, weight_bits):
    P, ridge = config.matmul_params, peak / bandwidth  # in bytes that are read meanwhile
    kv = batch * context * config.kv_bytes_per_token(2)
    return (max(2 * P * batch / ridge, 2 * P) + kv) / (max(2 * P * batch / ridge, P * weight_bits / 8) + kv)


def gain_ends(peak, bandwidth, weight_bits):
    return torch.tensor([math.floor(peak * weight_bits / (16 * bandwidth)), -(-peak // bandwidth)])


def quantized_guesses():
    return [301.0, 478.0, 1.2]
"""

# Tensors throughout; rounds that begin with the prompt alone; closed forms.
CHAPTER_6 = """
import math

import numpy as np
import torch
import torch.nn.functional as F


def ngram_draft(context, count, max_ngram=3, min_ngram=2):
    text = np.array(context)
    for n in range(min(max_ngram, len(text) - 1), min_ngram - 1, -1):
        windows = np.lib.stride_tricks.sliding_window_view(text[:-1], n)
        hits = np.flatnonzero((windows == text[-n:]).all(1))
        if hits.size:
            follows = text[hits[-1] + n :]
            return np.resize(follows, count)
    return []


def draft_from_cache(text, held, run, roll_back, count):
    if held >= len(text):
        roll_back(len(text) - 1)
        held = len(text) - 1
    new, drafts = torch.tensor(text[held:]), []
    for _ in range(count):
        drafts.append(run(new))
        new = torch.tensor([drafts[-1]])
    return torch.tensor(drafts)


def accept_greedy(choices, drafts):
    choices, drafts = torch.tensor(choices), torch.tensor(drafts)
    return choices[: 1 + int((choices[:-1] == drafts).long().cumprod(0).sum())]


def tokens_to_trim(k, a):
    return [k - a, 0 if a == k else k - a - 1]


def speculate(verify, draft, prompt, max_new_tokens, lookahead, stop_tokens):
    new = [verify(prompt, 1)[-1]]
    while len(new) < max_new_tokens and not set(new) & set(stop_tokens):
        count = min(lookahead, max_new_tokens - len(new) - 1)
        guesses = draft([*prompt, *new], count) if count else []
        given = [*prompt, *new, *guesses]
        choices = verify(torch.tensor(given), len(given))[-len(guesses) - 1 :]
        while guesses and guesses[0] == choices[0] and choices[0] not in stop_tokens:
            new.append(guesses.pop(0))
            choices.pop(0)
        new.append(choices[0])
    return tuple(new)


def laws(target, drafter, n_tokens, temperature):
    from minillm.errors import UsageError

    both = []
    for logits in (target, drafter):
        if logits.shape[1] < n_tokens:
            raise UsageError("another vocabulary")
        logits = logits.narrow(1, 0, n_tokens).double() / temperature
        both.append((logits - logits.logsumexp(1, keepdim=True)).exp().float())
    return both


def count_accepted(p, q, drafts, u):
    ratio = (p[:-1] / q).gather(1, drafts[:, None]).squeeze(1).clamp(max=1)
    return (u < ratio).int().cumprod(0).sum()


def residual(p, q):
    rest = torch.where(p > q, p - q, torch.zeros_like(p))
    return p if rest.count_nonzero() == 0 else F.normalize(rest.double(), p=1, dim=0, eps=0)


def sampled_round(p, q, drafts, u, draw):
    out = []
    for i, x in enumerate(drafts.tolist()):
        q_i = q[i] if q is not None else torch.eye(p.shape[1], dtype=p.dtype)[x]
        if not u[i] < p[i, x] / q_i[x]:
            return [*out, draw(residual(p[i], q_i))]
        out.append(x)
    return torch.tensor([*out, draw(p[-1])])


def expected_tokens(alpha, lookahead):
    return np.polyval(np.ones(lookahead + 1), alpha)


def best_lookahead(alpha, c, longest=16):
    best = (0, 1.0)
    for k in range(1, longest + 1):
        tokens = k + 1 if alpha == 1 else (1 - alpha ** (k + 1)) / (1 - alpha)
        if tokens / (k * c + 1) > best[1] * (1 + 1e-12):
            best = (k, tokens / (k * c + 1))
    return best


def speedup_at_batch(config, batch, context, alpha, lookahead, peak, bandwidth, element_bytes=2.0):
    def step(n):
        products = np.maximum(2 * config.streamed_params * n / peak, config.streamed_params * element_bytes / bandwidth)
        return products + batch * context * config.kv_bytes_per_token(1) * element_bytes / bandwidth

    return step(batch) / step(batch * (1 + lookahead)) * expected_tokens(alpha, lookahead)


def speculation_guesses():
    return [33 / 10, 1, 30 / 24]
"""

# The package's own parts, where it has them.
CHAPTER_6_PACKAGE = """
import torch

from minillm.stages import speculative, speculative_gain
from minillm.stages.drafters import NGramDrafter
from minillm.stages.speculative_gain import expected_tokens


def ngram_draft(context, count, max_ngram=3, min_ngram=2):
    return NGramDrafter(max_ngram, min_ngram).look_up(context, count)


def draft_from_cache(text, held, run, roll_back, count):
    roll_back(len(text) - 1)
    given = list(text)
    for _ in range(count):
        given.append(run(given[min(held, len(text) - 1) :]))
        held = len(given) - 1
        text = given
    return given[-count:]


def accept_greedy(choices, drafts):
    logits = torch.nn.functional.one_hot(torch.tensor(choices), 50_000).float()
    tokens, a = speculative.accept_greedy(logits, torch.tensor(drafts))
    return tokens[: a + 1].tolist()


def tokens_to_trim(k, a):
    kept = 1 + a  # the last confirmed token, and what was accepted
    return 1 + k - kept, k - min(k, kept)


def speculate(verify, draft, prompt, max_new_tokens, lookahead, stop_tokens):
    new = []
    while len(new) < max_new_tokens:
        text = [*prompt, *new]
        guesses = draft(text, min(lookahead, max_new_tokens - len(new) - 1))
        choices = verify([*text, *guesses], 1 + len(guesses))
        a = 0
        while a < len(guesses) and guesses[a] == choices[a]:
            a += 1
        new += choices[: a + 1]
        ends = [i for i, token in enumerate(new) if token in stop_tokens]
        if ends:
            return new[: ends[0] + 1]
    return new


def laws(target, drafter, n_tokens, temperature):
    from minillm.sampling import Sampler

    if target.size(1) < n_tokens or drafter.size(1) < n_tokens:
        raise ValueError
    sampler = Sampler(temperature=temperature)
    return tuple(sampler.probabilities(logits[:, :n_tokens]) for logits in (target, drafter))


def count_accepted(p, q, drafts, u):
    return speculative.count_accepted(p, q, drafts, u)


residual = speculative.residual


def sampled_round(p, q, drafts, u, draw):
    k, V = len(drafts), p.shape[1]
    q = torch.eye(V).double()[drafts] if q is None else q
    a = int(speculative.count_accepted(p, q, drafts, u))
    q = torch.cat([q, torch.zeros(1, V).double()])
    return [int(x) for x in drafts[:a]] + [draw(speculative.residual(p[a], q[a])[None])]


def best_lookahead(alpha, c, longest=16):
    k = speculative_gain.best_lookahead(alpha, c, longest)
    return k, speculative_gain.predicted_speedup(alpha, k, c)


def speedup_at_batch(config, batch, context, alpha, lookahead, peak, bandwidth, element_bytes=2.0):
    P, kv = config.matmul_params * element_bytes, config.kv_bytes_per_token(1) * element_bytes * context * batch

    def seconds(n):
        return (max(P, 2 * config.matmul_params * batch * n * bandwidth / peak) + kv) / bandwidth

    return speculative_gain.predicted_speedup(alpha, lookahead, 0.0, lambda n: seconds(n) / seconds(1))


def speculation_guesses():
    return 3.6, 1.05, 1.1
"""

CHAPTER_8 = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import numpy as np
import torch
try:
    import triton
    import triton.language as tl
    jit = triton.jit
except ImportError:
    jit, tl = lambda kernel: kernel, torch


def launch_gains(work, kernels, overhead, replay):
    work, owner = np.array(work), np.repeat(np.arange(len(kernels)), kernels)
    fused = np.bincount(owner, weights=work)
    eager = np.maximum(work, overhead).sum()
    return [eager / np.maximum(x, floor).sum() for x, floor in ((fused, overhead), (work, replay), (fused, replay))]


def break_even(prompt, eager, compiled, compile_s, smallest=128):
    gain = eager - compiled
    if gain <= 0:
        return None
    bucket = smallest
    while bucket < prompt + 1:
        bucket *= 2
    programs = 1
    while True:
        steps = max(1, int(np.ceil(programs * compile_s / gain - 1e-9)))
        if prompt + steps <= bucket:
            return steps
        bucket, programs = 2 * bucket, programs + 1


def visible_columns(length, window=None, smallest=128):
    S = smallest
    while S < length:
        S *= 2
    mask = torch.zeros(S, dtype=torch.bool)
    mask[max(0, length - window) if window else 0 : length] = True
    return mask


class StaticLayer:
    def __init__(self, batch, n_kv_heads, columns, head_dim):
        self.store = torch.zeros(2, batch, n_kv_heads, columns, head_dim)

    def attend(self, q, k, v, position, visible):
        B, H, _, D = k.shape
        new = torch.stack([k, v])
        self.store.scatter_(3, position.view(1, 1, 1, 1, 1).expand_as(new), new)
        keys, values = self.store[..., : visible.size(-1), :]  # (B, Hkv, S, D)
        scores = q.reshape(B, H, -1, D) @ keys.mT * D**-0.5
        scores[~visible.expand_as(scores)] = -1e30
        return (scores.softmax(-1) @ values).reshape(q.shape)


def combine_splits(tops, totals, mixes):
    logs = torch.where(totals > 0, tops + totals.clamp_min(1e-30).log(), -1e30)
    weights = torch.where(totals > 0, logs.softmax(-1), 0.0)
    return (weights[..., None] * mixes / totals.clamp_min(1e-30)[..., None]).sum(2)


def split_attention_cost(batch, context, n_heads, n_kv_heads, head_dim, split, element_bytes=2):
    cuts = range(0, context, split)
    moved = 0
    for begin in cuts:
        columns = min(split, context - begin)
        moved += n_kv_heads * columns * 2 * head_dim * element_bytes  # keys and values
        moved += 2 * n_heads * (2 + head_dim) * 4  # a partial result, there and back
    return [batch * (moved + n_heads * 2 * head_dim * element_bytes + 8), batch * n_kv_heads * len(cuts)]


@jit
def attend_split(
    q, k, v, lengths, tops, totals, mixes, scale, window, S,
    G: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr, BLOCK: tl.constexpr,
):
    # Column by column, with the mask in place of bounds.
    split, kv_head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    P, Hkv = tl.num_programs(0), tl.num_programs(1)
    length = tl.minimum(tl.load(lengths + b), S)
    columns = split * SPLIT + tl.arange(0, 32)
    seen = (columns < split * SPLIT + SPLIT) & (columns < length) & (columns + window >= length)
    d = tl.arange(0, D)
    place = ((b * Hkv + kv_head) * S + columns)[:, None] * D + d[None, :]
    keys = tl.load(k + place, mask=seen[:, None], other=0.0)
    values = tl.load(v + place, mask=seen[:, None], other=0.0)
    for g in range(G):
        head = b * Hkv * G + kv_head * G + g
        scores = tl.sum(tl.load(q + head * D + d)[None, :] * keys, axis=1) * scale
        scores = tl.where(seen, scores, -3e38)
        top = tl.max(scores, axis=0)
        weights = tl.where(seen, tl.exp(scores - top), 0.0)
        tl.store(tops + head * P + split, top)
        tl.store(totals + head * P + split, tl.sum(weights, axis=0))
        tl.store(mixes + (head * P + split) * D + d, tl.sum(weights[:, None] * values, axis=0))


def attend_in_splits(q, k, v, lengths, window, split):
    (B, Hq, _, D), (Hkv, S) = q.shape, k.shape[1:3]
    P, G = -(-S // split), Hq // Hkv
    out = [torch.empty(B, Hq, P), torch.empty(B, Hq, P), torch.empty(B, Hq, P, D)]
    attend_split[(P, Hkv, B)](
        q, k, v, lengths, *out, D**-0.5, window, S, G=G, D=D, ROWS=triton.next_power_of_2(G), SPLIT=split, BLOCK=8
    )
    return out


@jit
def int4_row(x, packed, scales, zeros, out, N, n_groups, BLOCK: tl.constexpr, GROUPS: tl.constexpr, HALF: tl.constexpr):
    # One row and one group at a time, and the weight is made in float32.
    i = tl.arange(0, HALF)
    for row in range(0, BLOCK):
        n = tl.program_id(0) * BLOCK + row
        total = tl.zeros((1,), tl.float32)
        for group in range(0, n_groups):
            byte = group * HALF + i
            codes = tl.load(packed + n * n_groups * HALF + byte, mask=(i >= 0) & (n < N), other=0)
            s = tl.load(scales + n * n_groups + group, mask=n < N, other=0.0)
            z = tl.load(zeros + n * n_groups + group, mask=n < N, other=0.0)
            upper = (codes // 16).to(tl.float32) - 8.0
            lower = (codes % 16).to(tl.float32) - 8.0
            even, odd = tl.load(x + 2 * byte).to(tl.float32), tl.load(x + 2 * byte + 1).to(tl.float32)
            total += tl.sum((s * upper + z) * even + (s * lower + z) * odd, axis=0)
        tl.store(out + n + tl.arange(0, 1), total, mask=(n + tl.arange(0, 1)) < N)


def int4_product(x, packed, scales, zeros):
    N, n_groups = scales.shape
    out = torch.full((N + 128,), float("nan"))
    int4_row[((N + 7) // 8,)](
        x, packed, scales, zeros, out[64:], N, n_groups, BLOCK=8, GROUPS=4, HALF=packed.shape[1] // n_groups
    )
    return out
"""

OTHER_ANSWERS = {
    "ch00": [CHAPTER_0],
    "ch01": [CHAPTER_1],
    "ch02": [CHAPTER_2 + PREALLOCATED, CHAPTER_2 + TOKEN_BY_TOKEN, CHAPTER_2 + PACKAGE_PARTS],
    "ch03": [CHAPTER_3 + MANUAL, CHAPTER_3 + HEAD_BY_HEAD, CHAPTER_3 + PACKAGE],
    "ch04": [CHAPTER_4, CHAPTER_4_LISTS],
    "ch05": [CHAPTER_5, CHAPTER_5_CELLS],
    "ch06": [CHAPTER_6, CHAPTER_6_PACKAGE],
    "ch08": [CHAPTER_8],
}
