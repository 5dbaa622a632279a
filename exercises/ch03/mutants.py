"""Wrong answers to the exercises of chapter 3, each of which its grader must refuse."""

from minillm.grading.mutants import Mutant

MAP = "h * n_kv_heads // n_heads for h in range(n_heads)"
ROWS = "rows = q.reshape(B, Hkv, -1, D)"
MASK = "visible = visible.repeat(Hq // Hkv, 1)"
TRIL = "torch.ones(T, S, dtype=torch.bool).tril(S - T)"
SDPA = "return F.scaled_dot_product_attention(rows, k, v, attn_mask=visible).reshape(B, Hq, T, D)"
WRITE_K = "self.keys[layer, :, :, start:S] = k"
WRITE_V = "self.values[layer, :, :, start:S] = v"
ATTEND = "return grouped_attention(q, self.keys[layer, :, :, :S], self.values[layer, :, :, :S])"
START = "start, S = self.length - k.shape[2], self.length"
HEADS = "heads = weight.reshape(n_kv_heads, H // n_kv_heads, head_dim, *weight.shape[1:])"
POOL = "return heads.mean(dim=1).flatten(0, 1)"
Q_LATENT = 'q_latent = torch.einsum("bhn,hnc->bhc", q_nope, w_uk)'
SCORES = "scores = q_latent @ latents.transpose(1, 2) + q_rope @ k_rope.transpose(1, 2)"
SCALE = "scale = (q_nope.shape[-1] + q_rope.shape[-1]) ** -0.5"
MIXED = "mixed = (scores * scale).softmax(-1) @ latents"
OUT = 'return torch.einsum("bhc,hvc->bhv", mixed, w_uv)'
INTENSITY = "return flops / ((2 * n_kv_heads * context + 2 * n_heads * new_tokens) * element_bytes)"


def attention(*lines: str) -> str:
    """A grouped_attention that ends with these lines, `visible` being the mask of T queries."""
    body = "\n".join(f"    {line}" for line in lines)
    return f"""
def grouped_attention(q, k, v):
    (B, Hq, T, D), (Hkv, S) = q.shape, k.shape[1:3]
    G, visible = Hq // Hkv, torch.ones(T, S, dtype=torch.bool).tril(S - T)
{body}
"""


def expanding(*lines: str) -> str:
    """An absorbed_mla that is none: it begins with these lines, which make `scores` (B, Hq, S), and `values` (B, Hq, S, d_v)."""
    body = "\n".join(f"    {line}" for line in lines)
    return f"""
def absorbed_mla(q_nope, q_rope, latents, k_rope, w_uk, w_uv):
    rotated = torch.einsum("bhr,bsr->bhs", q_rope, k_rope)
    scale = (q_nope.shape[-1] + q_rope.shape[-1]) ** -0.5
{body}
"""


ABSORBED_SCORES = 'scores = torch.einsum("bhc,bsc->bhs", torch.einsum("bhn,hnc->bhc", q_nope, w_uk), latents) + rotated'
EXPANDED_SCORES = (
    'scores = torch.einsum("bhn,bhsn->bhs", q_nope, torch.einsum("bsc,hnc->bhsn", latents, w_uk)) + rotated'
)
ABSORBED_OUT = 'return torch.einsum("bhc,hvc->bhv", (scores * scale).softmax(-1) @ latents, w_uv)'
EXPANDED_OUT = (
    'return torch.einsum("bhs,bhsv->bhv", (scores * scale).softmax(-1), torch.einsum("bsc,hvc->bhsv", latents, w_uv))'
)

# A cache that stores what chapter 2 stored, one key and value for each query head, in memory that is allocated once.
COPIES = """
class GroupedKVCache:
    def __init__(self, config, capacity):
        self.config, self.capacity, self.length, self.store = config, capacity, 0, None

    def positions(self, n_tokens):
        if self.length + n_tokens > self.capacity:
            raise ValueError("full")
        self.length += n_tokens
        return torch.arange(self.length - n_tokens, self.length)[None]

    def attend(self, layer, q, k, v):
        (B, Hq, T, D), S = q.shape, self.length
        if self.store is None:
            self.store = torch.empty(2, self.config.n_layers, B, Hq, self.capacity, D, dtype=k.dtype)
        for store, new in zip(self.store, (k, v)):
            store[layer, :, :, S - T : S] = new.repeat_interleave(Hq // k.shape[1], dim=1)
        keys, values = self.store[:, layer, :, :, :S]
        visible = torch.ones(T, S, dtype=torch.bool).tril(S - T)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=visible)
"""

MUTANTS = [
    # head_map
    Mutant("head_map", "Maps as repeat does, h % Hkv.", (MAP, "h % n_kv_heads for h in range(n_heads)"), says="h % Hkv"),
    Mutant("head_map", "Divides by the number of KV heads.", (MAP, "h // n_kv_heads for h in range(n_heads)"), says="divide by G"),
    Mutant("head_map", "Lists the KV heads.", (MAP, "h for h in range(n_kv_heads)"), says="each query head"),
    Mutant("head_map", "Counts from 1.", (MAP, "1 + h * n_kv_heads // n_heads for h in range(n_heads)"), says="from 0"),
    Mutant("head_map", "Gives floats.", (MAP, "float(h * n_kv_heads // n_heads) for h in range(n_heads)"), says="whole numbers"),
    Mutant("head_map", "Gives the first query head of each group.", (MAP, "h - h % (n_heads // n_kv_heads) for h in range(n_heads)"), says="first query head"),
    Mutant("head_map", "Rounds to the nearest head.", (MAP, "min(round(h * n_kv_heads / n_heads), n_kv_heads - 1) for h in range(n_heads)")),
    Mutant("head_map", "Knows groups of 3.", (MAP, "h // 3 for h in range(n_heads)")),
    Mutant("head_map", "Multiplies by a ratio that floats do not have.", (MAP, "int(h * (n_kv_heads / n_heads)) for h in range(n_heads)")),
    Mutant("head_map", "Takes a share of a share in floats.", (MAP, "int(h / n_heads * n_kv_heads) for h in range(n_heads)")),
    Mutant("head_map", "Knows models of at most 8 KV heads.", (MAP, "min(h * n_kv_heads // n_heads, 7) for h in range(n_heads)")),
    # grouped_attention: values
    Mutant("grouped_attention", "Puts the queries into groups as h % Hkv.", (ROWS, "rows = q.reshape(B, -1, Hkv, T, D).transpose(1, 2).reshape(B, Hkv, -1, D)"), (SDPA, SDPA.replace(".reshape(B, Hq, T, D)", ".reshape(B, Hkv, -1, T, D).transpose(1, 2).reshape(B, Hq, T, D)")), says="h % Hkv"),
    Mutant("grouped_attention", "Orders the rows of the mask by token.", (MASK, "visible = visible.repeat_interleave(Hq // Hkv, 0)"), says="rows of the mask"),
    Mutant("grouped_attention", "Orders the queries by token and the mask by head.", (ROWS, "rows = q.reshape(B, Hkv, -1, T, D).transpose(2, 3).reshape(B, Hkv, -1, D)"), (SDPA, SDPA.replace(".reshape(B, Hq, T, D)", ".reshape(B, Hkv, T, -1, D).transpose(2, 3).reshape(B, Hq, T, D)"))),
    Mutant("grouped_attention", "Leaves the results in the order of tokens.", (ROWS, "rows = q.reshape(B, Hkv, -1, T, D).transpose(2, 3).reshape(B, Hkv, -1, D)"), (MASK, "visible = visible.repeat_interleave(Hq // Hkv, 0)")),
    Mutant("grouped_attention", "Has no mask, as in decode.", (", attn_mask=visible", ""), says="needs its mask"),
    Mutant("grouped_attention", "Aligns the mask to the first keys.", (".tril(S - T)", ".tril()"), says="first keys"),
    Mutant("grouped_attention", "Uses is_causal over the rows of all heads.", ("attn_mask=visible", "is_causal=T > 1")),
    Mutant("grouped_attention", "Hides a query's own key, but for the first.", (".tril(S - T)", ".tril(max(S - T - 1, 0))")),
    Mutant("grouped_attention", "Is off by one.", (".tril(S - T)", ".tril(S - T + 1)"), says="off by one"),
    Mutant("grouped_attention", "Does not scale.", ("attn_mask=visible", "attn_mask=visible, scale=1.0"), says="not divided"),
    Mutant("grouped_attention", "Divides by D.", ("attn_mask=visible", "attn_mask=visible, scale=1 / D"), says="not by its root"),
    Mutant("grouped_attention", "Puts a group's queries side by side and scales by their length.", ("attn_mask=visible", "attn_mask=visible, scale=(Hq // Hkv * D) ** -0.5"), says="however many rows"),
    Mutant("grouped_attention", "Returns groups.", (".reshape(B, Hq, T, D)\n", "\n"), says="shape"),
    Mutant("grouped_attention", "Returns float32 always.", (SDPA, SDPA + ".float()"), says="float64 is due"),
    Mutant("grouped_attention", "Exchanges keys and values.", ("(rows, k, v,", "(rows, v, k,")),
    Mutant("grouped_attention", "Attends with the mean query of a group.", (ROWS, "rows = q.reshape(B, Hkv, -1, T, D).mean(2, keepdim=True).expand(-1, -1, Hq // Hkv, -1, -1).reshape(B, Hkv, -1, D)")),
    Mutant("grouped_attention", "Computes exp of the scores as they are.", code=attention("scores = q.reshape(B, Hkv, -1, D) @ k.transpose(2, 3) * D**-0.5", "weights = scores.exp() * visible.repeat(G, 1)", "return (weights / weights.sum(-1, keepdim=True) @ v).to(q.dtype).reshape(B, Hq, T, D)"), says="NaN"),
    Mutant("grouped_attention", "Masks after the softmax.", code=attention("weights = (q.reshape(B, Hkv, -1, D) @ k.transpose(2, 3) * D**-0.5).softmax(-1) * visible.repeat(G, 1)", "return (weights @ v).reshape(B, Hq, T, D)")),
    # grouped_attention: bytes
    Mutant("grouped_attention", "Copies keys and values for each query head.", code=attention("return F.scaled_dot_product_attention(q, k.repeat_interleave(G, 1), v.repeat_interleave(G, 1), attn_mask=visible)"), says="It copies them for each"),
    Mutant("grouped_attention", "Copies in decode only.", code=attention("if T > 1:", "    return F.scaled_dot_product_attention(q.reshape(B, Hkv, -1, D), k, v, attn_mask=visible.repeat(G, 1)).reshape(q.shape)", "return F.scaled_dot_product_attention(q, k.repeat_interleave(G, 1), v.repeat_interleave(G, 1))"), says="It copies them for each"),
    Mutant("grouped_attention", "Copies in a chunk only.", code=attention("if T == 1:", "    return F.scaled_dot_product_attention(q.reshape(B, Hkv, -1, D), k, v).reshape(q.shape)", "return F.scaled_dot_product_attention(q, k.repeat_interleave(G, 1), v.repeat_interleave(G, 1), attn_mask=visible)"), says="With 4 new tokens"),
    Mutant("grouped_attention", "Copies by indexing.", code=attention("heads = torch.arange(Hq) // G", "return F.scaled_dot_product_attention(q, k[:, heads], v[:, heads], attn_mask=visible)"), says="for each query head"),
    Mutant("grouped_attention", "Expands to a view, which the next reshape copies.", code=attention("k, v = (x[:, :, None].expand(-1, -1, G, -1, -1).reshape(B, Hq, S, D) for x in (k, v))", "return F.scaled_dot_product_attention(q, k, v, attn_mask=visible)"), says="for each query head"),
    Mutant("grouped_attention", "Lets a matrix product broadcast.", code=attention("scores = q.reshape(B, Hkv, G, T, D) @ k[:, :, None].transpose(3, 4) * D**-0.5", "weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)", "return (weights @ v[:, :, None]).reshape(B, Hq, T, D)"), says="broadcasts"),
    Mutant("grouped_attention", "Copies the keys alone.", code=attention("scores = q @ k.repeat_interleave(G, 1).transpose(2, 3) * D**-0.5", "weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)", "return (weights.reshape(B, Hkv, -1, S) @ v).reshape(B, Hq, T, D)")),
    Mutant("grouped_attention", "Goes through the query heads one by one.", code=attention("return torch.cat([F.scaled_dot_product_attention(q[:, h : h + 1], k[:, h // G : h // G + 1], v[:, h // G : h // G + 1], attn_mask=visible) for h in range(Hq)], 1)"), says="loaded for each"),
    Mutant("grouped_attention", "Goes through the members of the groups one by one.", code=attention("out = [F.scaled_dot_product_attention(x, k, v, attn_mask=visible) for x in q.reshape(B, Hkv, G, T, D).unbind(2)]", "return torch.stack(out, 2).reshape(B, Hq, T, D)"), says="loaded for each"),
    Mutant("grouped_attention", "Scales the keys instead of the queries.", code=attention("return F.scaled_dot_product_attention(q.reshape(B, Hkv, -1, D), k * D**-0.5, v, attn_mask=visible.repeat(G, 1), scale=1.0).reshape(B, Hq, T, D)"), says="where they lie"),
    Mutant("grouped_attention", "Converts keys and values to float64.", code=attention("q64, k64, v64 = q.double(), k.double(), v.double()", "return F.scaled_dot_product_attention(q64.reshape(B, Hkv, -1, D), k64, v64, attn_mask=visible.repeat(G, 1)).reshape(B, Hq, T, D).to(q.dtype)")),
    Mutant("grouped_attention", "Computes where nobody counts.", code=attention("import numpy as np", "x, y, z = (t.double().numpy() if t.dtype == torch.bfloat16 else t.numpy() for t in (q.reshape(B, Hkv, -1, D), k, v))", "s = np.where(visible.repeat(G, 1).numpy(), x @ y.swapaxes(2, 3) * D**-0.5, -np.inf)", "w = np.exp(s - s.max(-1, keepdims=True))", "return torch.from_numpy(w / w.sum(-1, keepdims=True) @ z).to(q.dtype).reshape(B, Hq, T, D)"), says="PyTorch's operators"),
    Mutant("grouped_attention", "Keeps a mask by its length, of whatever group it was.", code=attention("kept = grouped_attention.__dict__.setdefault((T, S), visible.repeat(G, 1))", "return F.scaled_dot_product_attention(q.reshape(B, Hkv, -1, D), k, v, attn_mask=kept).reshape(q.shape)")),
    Mutant("grouped_attention", "Has a mask of 4,096 tokens at most.", (TRIL, "torch.ones(4096, 4096, dtype=torch.bool).tril()[S - T : S, :S]")),
    Mutant("grouped_attention", "Hides with -1e4 in place of minus infinity.", code=attention("scores = (q.reshape(B, Hkv, -1, D) @ k.transpose(2, 3) * D**-0.5).masked_fill(~visible.repeat(G, 1), -1e4)", "return (scores.softmax(-1) @ v).reshape(B, Hq, T, D)"), says="large scores"),
    Mutant("grouped_attention", "Adds -1e4 to hidden scores.", code=attention("scores = q.reshape(B, Hkv, -1, D) @ k.transpose(2, 3) * D**-0.5 - 1e4 * (~visible.repeat(G, 1)).to(q.dtype)", "return (scores.softmax(-1) @ v).reshape(B, Hq, T, D)"), says="large scores"),
    # grouped_cache
    Mutant("grouped_cache", "Keeps a key and a value for each query head.", code=COPIES, says="so keep 2"),
    Mutant("grouped_cache", "Keeps KV heads and copies them in front of every use.", (ATTEND, "G, keys, values = self.config.group_size, self.keys[layer, :, :, :S], self.values[layer, :, :, :S]\n        return grouped_attention(q, keys.repeat_interleave(G, 1), values.repeat_interleave(G, 1))"), says="copies heads"),
    Mutant("grouped_cache", "Attends over the whole capacity, masked.", (ATTEND, "hidden = torch.arange(self.capacity) > torch.arange(start, S)[:, None]\n        rows = q.reshape(q.shape[0], k.shape[1], -1, k.shape[3])\n        bias = torch.zeros(hidden.shape, dtype=q.dtype).masked_fill(hidden, -torch.inf).repeat(self.config.group_size, 1)\n        return F.scaled_dot_product_attention(rows, self.keys[layer], self.values[layer], attn_mask=bias).reshape(q.shape)"), ("torch.empty(self", "torch.zeros(self"), ("torch.empty_like", "torch.zeros_like"), says="still empty"),
    Mutant("grouped_cache", "Writes every pass to the beginning.", (WRITE_K, "self.keys[layer, :, :, : S - start] = k"), (WRITE_V, "self.values[layer, :, :, : S - start] = v"), ("torch.empty(self", "torch.zeros(self"), ("torch.empty_like", "torch.zeros_like")),
    Mutant("grouped_cache", "Stores all layers in one place.", (START, START + "\n        layer = 0"), says="of its own"),
    Mutant("grouped_cache", "Exchanges keys and values.", (WRITE_K, "self.keys[layer, :, :, start:S] = v"), (WRITE_V, "self.values[layer, :, :, start:S] = k"), says="exchanged"),
    Mutant("grouped_cache", "Sees nothing of the passes before.", (ATTEND, "return grouped_attention(q, k, v)"), says="passes before"),
    Mutant("grouped_cache", "Hides the newest tokens.", (ATTEND, ATTEND.replace(":S]", ":max(start, 1)]"))),
    Mutant("grouped_cache", "Maps query heads as repeat does.", (ATTEND, "G, keys, values = self.config.group_size, self.keys[layer, :, :, :S], self.values[layer, :, :, :S]\n        return grouped_attention(q, keys.repeat(1, G, 1, 1), values.repeat(1, G, 1, 1))"), says="h % Hkv"),
    Mutant("grouped_cache", "Has no mask in a chunk.", (ATTEND, "rows = q.reshape(q.shape[0], k.shape[1], -1, k.shape[3])\n        return F.scaled_dot_product_attention(rows, self.keys[layer, :, :, :S], self.values[layer, :, :, :S]).reshape(q.shape)"), says="needs its mask"),
    Mutant("grouped_cache", "Makes room for one sequence.", ("n_layers, B, Hkv", "n_layers, 1, Hkv")),
    Mutant("grouped_cache", "Makes its memory in float32.", (", dtype=k.dtype", "")),
    Mutant("grouped_cache", "Rounds keys and values to bfloat16.", (", dtype=k.dtype", ", dtype=torch.bfloat16"), (ATTEND, "return grouped_attention(q, self.keys[layer, :, :, :S].to(q.dtype), self.values[layer, :, :, :S].to(q.dtype))")),
    Mutant("grouped_cache", "Keeps the first chunk's length.", (START, "start, S = self.length - k.shape[2], self.length\n        self.first = getattr(self, 'first', S)\n        if k.shape[2] > 1 and start:\n            start = self.first\n            S = start + k.shape[2]")),
    Mutant("grouped_cache", "Keeps keys and values in the class.", ("        self.keys: Tensor | None = None  # how these are laid out is up to you\n        self.values: Tensor | None = None\n", ""), ("if self.keys is None:", "self = GroupedKVCache if not setattr(GroupedKVCache, 'config', self.config) and not setattr(GroupedKVCache, 'length', self.length) and not setattr(GroupedKVCache, 'capacity', 4000) else None\n        if getattr(self, 'keys', None) is None or self.shape != (k.shape[:2], k.shape[3], k.dtype, self.config.n_layers):\n            self.shape = (k.shape[:2], k.shape[3], k.dtype, self.config.n_layers)"), says="disturb each other"),
    Mutant("grouped_cache", "Never refuses.", ("if self.length + n_tokens > self.capacity:", "if False:"), says="ValueError"),
    Mutant("grouped_cache", "Returns nothing.", ("return grouped_attention(q, self", "grouped_attention(q, self"), says="None"),
    Mutant("grouped_cache", "Knows float32 and bfloat16 only.", (", dtype=k.dtype", ", dtype=torch.bfloat16 if k.dtype == torch.bfloat16 else torch.float32"), (ATTEND, "return grouped_attention(q, self.keys[layer, :, :, :S].to(q.dtype), self.values[layer, :, :, :S].to(q.dtype))")),
    Mutant("grouped_cache", "Makes room for 1,024 tokens at most.", ("self.capacity, D, dtype", "min(self.capacity, 1024), D, dtype")),
    Mutant("grouped_cache", "Makes room for the layers of one model.", ("self.config.n_layers, B", "30, B")),
    Mutant("grouped_cache", "Makes no object.", code="def GroupedKVCache(config, capacity):\n    return None\n", says="must make an object"),
    # pool_heads
    Mutant("pool_heads", "Pools heads that are apart.", (HEADS, "heads = weight.reshape(H // n_kv_heads, n_kv_heads, head_dim, *weight.shape[1:])"), ("mean(dim=1)", "mean(dim=0)"), says="neighbours"),
    Mutant("pool_heads", "Pools neighbouring rows.", (HEADS, "heads = weight.reshape(n_kv_heads * head_dim, H // n_kv_heads, *weight.shape[1:])"), (POOL, "return heads.mean(dim=1)"), says="neighbouring rows"),
    Mutant("pool_heads", "Adds up.", ("heads.mean", "heads.sum"), says="mean divides"),
    Mutant("pool_heads", "Keeps the first head of each group.", ("heads.mean(dim=1)", "heads[:, 0]"), says="first head of each"),
    Mutant("pool_heads", "Keeps the first heads.", (POOL, "return weight[: n_kv_heads * head_dim]"), says="first heads"),
    Mutant("pool_heads", "Takes the median.", ("heads.mean(dim=1)", "heads.median(dim=1).values"), says="median"),
    Mutant("pool_heads", "Leaves heads apart.", (".flatten(0, 1)", ""), says="shape"),
    Mutant("pool_heads", "Does not refuse.", (POOL, "return heads.mean(dim=1).flatten(0, 1)"), ("        raise ValueError(f\"{H} KV heads cannot become {n_kv_heads}\")", "        return weight"), says="ValueError"),
    Mutant("pool_heads", "Refuses only where the rows do not divide.", ("if H % n_kv_heads:", "if weight.shape[0] % n_kv_heads:"), ("H // n_kv_heads, head_dim", "max(H // n_kv_heads, 1), -1")),
    Mutant("pool_heads", "Returns float32.", (POOL, "return heads.float().mean(dim=1).flatten(0, 1)"), says="is due"),
    Mutant("pool_heads", "Takes a bias for a matrix.", ("*weight.shape[1:])", "weight.shape[1])"), says="raises"),
    Mutant("pool_heads", "Divides by the root, to keep the size of the numbers.", ("heads.mean(dim=1)", "(heads.sum(dim=1) / (H // n_kv_heads) ** 0.5)")),
    Mutant("pool_heads", "Works on what it was given.", (POOL, "weight /= H // n_kv_heads\n    return heads.sum(dim=1).flatten(0, 1)"), says="changes what it was given"),
    # tokens_that_fit
    Mutant("tokens_that_fit", "Takes DeepSeek's num_key_value_heads at its word.", ('if "kv_lora_rank" in config:', "if False:"), says="whatever num_key_value_heads says"),
    Mutant("tokens_that_fit", "Keeps what MLA expands.", ('config["kv_lora_rank"] + config["qk_rope_head_dim"]', 'config["num_attention_heads"] * (config["qk_nope_head_dim"] + config["qk_rope_head_dim"] + config["v_head_dim"])'), says="follow from the latent"),
    Mutant("tokens_that_fit", "Forgets the rotated key.", (' + config["qk_rope_head_dim"]', ""), says="beside the latent"),
    Mutant("tokens_that_fit", "Keeps a rotated key for each head.", ('+ config["qk_rope_head_dim"]', '+ config["num_attention_heads"] * config["qk_rope_head_dim"]'), says="one rotated key"),
    Mutant("tokens_that_fit", "Keeps a latent for keys and one for values.", ('numbers = config["kv_lora_rank"] + config["qk_rope_head_dim"]', 'numbers = 2 * (config["kv_lora_rank"] + config["qk_rope_head_dim"])'), says="kept once"),
    Mutant("tokens_that_fit", "Keeps query heads.", ('config.get("num_key_value_heads", Hq)', "Hq"), says="not query heads"),
    Mutant("tokens_that_fit", "Takes a missing number of KV heads for 1.", ('config.get("num_key_value_heads", Hq)', 'config.get("num_key_value_heads", 1)'), says="is missing"),
    Mutant("tokens_that_fit", "Needs num_key_value_heads.", ('config.get("num_key_value_heads", Hq)', 'config["num_key_value_heads"]'), says="KeyError"),
    Mutant("tokens_that_fit", "Ignores head_dim.", ('config.get("head_dim", config["hidden_size"] // Hq)', 'config["hidden_size"] // Hq'), says="head_dim, where"),
    Mutant("tokens_that_fit", "Divides the width by the KV heads.", ('config["hidden_size"] // Hq)', 'config["hidden_size"] // config.get("num_key_value_heads", Hq))')),
    Mutant("tokens_that_fit", "Keeps keys alone.", ("numbers = 2 * config.get", "numbers = config.get"), says="2 of them"),
    Mutant("tokens_that_fit", "Counts one layer.", ('config["num_hidden_layers"] * ', ""), says="Each layer"),
    Mutant("tokens_that_fit", "Knows 16 bits only.", ("* numbers * element_bytes", "* numbers * 2"), says="bytes of a number"),
    Mutant("tokens_that_fit", "Rounds up.", ("int(memory // (", "-int(-memory // ("), says="round down"),
    Mutant("tokens_that_fit", "Gives a part of a token.", ("int(memory // (", "(memory / ("), says="whole"),
    Mutant("tokens_that_fit", "Takes bytes for binary gigabytes.", ("int(memory // (", "int(memory / 1e9 * 2**30 // ("), says="1e9"),
    Mutant("tokens_that_fit", "Takes half a byte for none.", ("numbers * element_bytes", "numbers * max(1, int(element_bytes))")),
    Mutant("tokens_that_fit", "Knows DeepSeek's latents only.", ('config["kv_lora_rank"] + config["qk_rope_head_dim"]', "576")),
    Mutant("tokens_that_fit", "Takes every rotated key to have 64 numbers.", ('+ config["qk_rope_head_dim"]', "+ 64")),
    Mutant("tokens_that_fit", "Takes a model that names head_dim for one without MLA.", ('if "kv_lora_rank" in config:', 'if "kv_lora_rank" in config and "head_dim" not in config:'), says="whatever num_key_value_heads says"),
    Mutant("tokens_that_fit", "Takes a model with one KV head for MQA, MLA or not.", ('if "kv_lora_rank" in config:', 'if "kv_lora_rank" in config and config.get("num_key_value_heads") != 1:'), says="whatever num_key_value_heads says"),
    Mutant("tokens_that_fit", "Needs num_key_value_heads to see MLA.", ('if "kv_lora_rank" in config:', 'if "kv_lora_rank" in config and "num_key_value_heads" in config:'), says="whatever num_key_value_heads says"),
    Mutant("tokens_that_fit", "Gives a layer whole bytes.", ("* numbers * element_bytes))", "* int(numbers * element_bytes)))")),
    # attention_intensity
    Mutant("attention_intensity", "Is the limit of a long context, 2 G T / b.", (INTENSITY, "return 2 * n_heads // n_kv_heads * new_tokens / element_bytes"), says="Queries are read"),
    Mutant("attention_intensity", "Forgets that results are written.", ("2 * n_heads * new_tokens)", "n_heads * new_tokens)"), says="Results are written"),
    Mutant("attention_intensity", "Is that of one MHA head, S T / (S + T).", (INTENSITY, "return 2 * context * new_tokens / (context + new_tokens) / element_bytes"), says="once for a group"),
    Mutant("attention_intensity", "Computes for KV heads.", ("4 * n_heads", "4 * n_kv_heads"), says="G of them"),
    Mutant("attention_intensity", "Has a result for each KV head.", ("2 * n_heads * new_tokens)", "2 * n_kv_heads * new_tokens)"), says="for each query head"),
    Mutant("attention_intensity", "Reads keys alone.", ("(2 * n_kv_heads", "(n_kv_heads"), says="2 of them"),
    Mutant("attention_intensity", "Counts 2 FLOPs.", ("flops = 4", "flops = 2"), says=": 4."),
    Mutant("attention_intensity", "Ignores the new tokens.", ("flops = 4 * n_heads * context * new_tokens", "flops = 4 * n_heads * context"), ("2 * n_heads * new_tokens)", "2 * n_heads)"), says="each of which has a query"),
    Mutant("attention_intensity", "Reads the keys anew for each token.", ("n_kv_heads * context", "n_kv_heads * context * new_tokens"), says="once for all new tokens"),
    Mutant("attention_intensity", "Knows 16 bits only.", (") * element_bytes)", ") * 2)"), says="bytes of a number"),
    Mutant("attention_intensity", "Leaves the bytes out.", (") * element_bytes)", "))"), says="leaves out"),
    Mutant("attention_intensity", "Is upside down.", (INTENSITY, "return ((2 * n_kv_heads * context + 2 * n_heads * new_tokens) * element_bytes) / flops"), says="upside down"),
    Mutant("attention_intensity", "Discounts the masked half.", ("flops = 4 * n_heads * context * new_tokens", "flops = 4 * n_heads * (context * new_tokens - new_tokens * (new_tokens - 1) / 2)")),
    # absorbed_mla: values
    Mutant("absorbed_mla", "Scales by the root of d_c + d_r.", (SCALE, "scale = (latents.shape[-1] + q_rope.shape[-1]) ** -0.5"), says="d_c + d_r"),
    Mutant("absorbed_mla", "Scales by the root of d_nope.", (SCALE, "scale = q_nope.shape[-1] ** -0.5"), says="forgets the rotated part"),
    Mutant("absorbed_mla", "Scales by the root of d_c.", (SCALE, "scale = latents.shape[-1] ** -0.5"), says="d_c;"),
    Mutant("absorbed_mla", "Scales by the root of d_r.", (SCALE, "scale = q_rope.shape[-1] ** -0.5"), says="without position"),
    Mutant("absorbed_mla", "Does not scale.", (SCALE, "scale = 1.0"), says="not scaled"),
    Mutant("absorbed_mla", "Leaves out the rotated part.", (" + q_rope @ k_rope.transpose(1, 2)", ""), says="q_rope . k_rope"),
    Mutant("absorbed_mla", "Takes the rotated part alone.", ("q_latent @ latents.transpose(1, 2) + ", ""), says="is missing"),
    Mutant("absorbed_mla", "Has two softmaxes.", (MIXED, "mixed = (((scores - q_rope @ k_rope.transpose(1, 2)) * scale).softmax(-1) + ((q_rope @ k_rope.transpose(1, 2)) * scale).softmax(-1)) / 2 @ latents"), says="one softmax"),
    Mutant("absorbed_mla", "Scales one part only.", (SCORES, SCORES + " / scale"), says="Both parts of the score are scaled"),
    Mutant("absorbed_mla", "Gives each part a scale of its own.", (SCORES, "scores = q_latent @ latents.transpose(1, 2) * q_nope.shape[-1] ** -0.5 + q_rope @ k_rope.transpose(1, 2) * q_rope.shape[-1] ** -0.5"), ("(scores * scale)", "scores"), says="have one scale"),
    Mutant("absorbed_mla", "Takes the first head's w_uk for all.", ("q_nope, w_uk)", "q_nope, w_uk[:1].expand_as(w_uk))")),
    Mutant("absorbed_mla", "Takes the first head's projections for all.", ("q_nope, w_uk)", "q_nope, w_uk[:1].expand_as(w_uk))"), ("mixed, w_uv)", "mixed, w_uv[:1].expand_as(w_uv))"), says="of its own"),
    Mutant("absorbed_mla", "Returns the sum of latents.", (OUT, "return mixed"), says="shape"),
    Mutant("absorbed_mla", "Adds the heads up.", ('"bhc,hvc->bhv"', '"bhc,hvc->bv"'), says="shape"),
    Mutant("absorbed_mla", "Takes the first sequence's latents for all.", ("latents.transpose(1, 2)", "latents[:1].transpose(1, 2)")),
    Mutant("absorbed_mla", "Returns float32.", (OUT, OUT + ".float()"), says="float64 is due"),
    Mutant("absorbed_mla", "Computes exp of the scores as they are.", ("(scores * scale).softmax(-1)", "((scores * scale).exp() / (scores * scale).exp().sum(-1, keepdim=True))"), says="NaN"),
    # absorbed_mla: bytes
    Mutant("absorbed_mla", "Makes the keys and the values of all heads.", code=expanding(EXPANDED_SCORES, EXPANDED_OUT), says="w_uk to the query"),
    Mutant("absorbed_mla", "Makes the keys of all heads.", code=expanding(EXPANDED_SCORES, ABSORBED_OUT), says="w_uk to the query"),
    Mutant("absorbed_mla", "Makes the values of all heads.", code=expanding(ABSORBED_SCORES, EXPANDED_OUT), says="w_uv to the weighted sum"),
    Mutant("absorbed_mla", "Lets a matrix product broadcast the latents.", ("q_latent @ latents.transpose(1, 2)", "(q_latent[:, :, None] @ latents[:, None].transpose(2, 3))[:, :, 0]"), says="broadcast"),
    Mutant("absorbed_mla", "Copies the latents for each head.", ("softmax(-1) @ latents", "softmax(-1)[:, :, None] @ latents[:, None].repeat(1, q_nope.shape[1], 1, 1)"), (OUT, 'return torch.einsum("bhtc,hvc->bhv", mixed, w_uv)'), says="copies latents"),
    Mutant("absorbed_mla", "Expands in one product of three.", (Q_LATENT, 'absorbed = torch.einsum("bsc,hnc,bhn->bhs", latents, w_uk, q_nope)'), ("q_latent @ latents.transpose(1, 2)", "absorbed"), says="w_uk to the query"),
    Mutant("absorbed_mla", "Goes through the heads one by one.", code=expanding("out = []", "for h in range(q_nope.shape[1]):", "    k = latents @ w_uk[h].T", "    s = (k @ q_nope[:, h, :, None])[..., 0] + rotated[:, h]", "    out.append(((s * scale).softmax(-1)[:, None] @ (latents @ w_uv[h].T))[:, 0])", "return torch.stack(out, 1)"), says="w_uk to the query"),
    Mutant("absorbed_mla", "Expands, and keeps what it gave before.", code=expanding("kept = absorbed_mla.__dict__", "latents + 0, k_rope + 0, w_uk + 0, w_uv + 0", "key = (q_nope.shape, q_nope.flatten()[0].item())", "if key in kept:", "    return kept[key]", EXPANDED_SCORES, EXPANDED_OUT.replace("return", "kept[key] ="), "return kept[key]"), says="w_uk to the query"),
    # sharing_guesses
    Mutant("sharing_guesses", "Thinks that a third of the keys is three times as fast, always.", ("1.043, 1.825, 3900.0", "3.0, 3.0, 1.0"), says="Over 256"),
    Mutant("sharing_guesses", "Forgets the weights in a long text.", ("1.825", "3.0"), says="Over 8,192"),
    Mutant("sharing_guesses", "Sees no gain in a long text.", ("1.825", "1.05"), says="Over 8,192"),
    Mutant("sharing_guesses", "Sees no gain in a short text.", ("1.043", "1.0"), says="Over 256"),
    Mutant("sharing_guesses", "Takes the length at which the cache is half the weights.", ("3900.0", "5839.0"), says="1.5 times"),
    Mutant("sharing_guesses", "Counts bytes of 16 bits for keys alone.", ("3900.0", "7785.0"), says="1.5 times"),
    Mutant("sharing_guesses", "Gives two numbers.", (", 3900.0", ""), says="three numbers"),
    Mutant("sharing_guesses", "Gives NaN.", ("1.825", "float('nan')"), says="three numbers"),
    Mutant("sharing_guesses", "Gives a number beyond all measure.", ("1.825", "10**400"), says="Over 8,192"),
    Mutant("sharing_guesses", "Gives text.", ("1.043, 1.825, 3900.0", "'1.043', '1.825', '3900'"), says="three numbers"),
]  # fmt: skip
