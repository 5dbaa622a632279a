"""Wrong answers to the exercises of chapter 1, each of which its grader must refuse."""

from minillm.grading.mutants import Mutant

MASK = "scores = scores.masked_fill(key_positions > query_positions, -torch.inf)"
NUCLEUS = "return torch.zeros_like(kept).scatter(-1, ids, kept)"
MULTINOMIAL = "torch.multinomial(probabilities, 1, generator=generator)[:, 0]"
FLOPS = "return sum_to(last) - sum_to(first - 1)"

MUTANTS = [
    # causal_attention
    Mutant("causal_attention", "Has no mask.", (MASK, ""), says="mask is missing"),
    Mutant("causal_attention", "Uses is_causal, whose triangle starts at the first key.", ("return scores.softmax(dim=-1) @ v", "return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)"), says="first keys"),
    Mutant("causal_attention", "Hides a query's own key.", ("key_positions > query", "key_positions >= query"), says="NaN"),
    Mutant("causal_attention", "Lets a query see one key too far.", ("key_positions > query_positions", "key_positions > query_positions + 1"), says="off by one"),
    Mutant("causal_attention", "Does not scale the scores.", (" / D**0.5", ""), says="sqrt(D)"),
    Mutant("causal_attention", "Divides by D.", ("D**0.5", "D"), says="root"),
    Mutant("causal_attention", "Sets hidden scores to 0.", ("-torch.inf", "0.0"), says="-inf"),
    Mutant("causal_attention", "Hides with -1e4 in place of minus infinity.", ("-torch.inf", "-1e4"), says="large scores"),
    Mutant("causal_attention", "Masks after the softmax.", (MASK, ""), ("scores.softmax(dim=-1)", "scores.softmax(dim=-1).masked_fill(key_positions > query_positions, 0.0)"), says="before the softmax"),
    Mutant("causal_attention", "Takes the softmax over the queries.", ("softmax(dim=-1)", "softmax(dim=-2)")),
    Mutant("causal_attention", "Always gives float32.", ("return scores.softmax(dim=-1) @ v", "return scores.float().softmax(dim=-1) @ v.float()"), says="bfloat16"),
    Mutant("causal_attention", "Computes exp without taking the largest score off.", ("scores.softmax(dim=-1)", "(scores.exp() / scores.exp().sum(-1, keepdim=True))"), says="NaN"),
    Mutant("causal_attention", "Looks past the mask when there is one query and more keys.", ("T, S, D = q.shape[2], k.shape[2], q.shape[3]", "T, S, D = q.shape[2], k.shape[2], q.shape[3]\n    if T != S:\n        return (q @ k.transpose(2, 3) / D**0.5).softmax(-1) @ v"), says="mask is missing"),
    Mutant("causal_attention", "Scales the queries in place.", ("scores = q @", "q /= 1.0 * D**0.5\n    scores = q @"), (" / D**0.5", ""), says="copy"),
    # rope
    Mutant("rope", "Pairs neighbours.", ("x[..., :half].float(), x[..., half:].float()", "x[..., ::2].float(), x[..., 1::2].float()"), ("torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)", "torch.stack([a * cos - b * sin, b * cos + a * sin], dim=-1).flatten(-2)"), says="half-split"),
    Mutant("rope", "Turns the other way.", ("a * cos - b * sin, b * cos + a * sin", "a * cos + b * sin, b * cos - a * sin"), says="signs"),
    Mutant("rope", "Halves the exponent.", ("/ half)", "/ (2 * half))"), says="exponent"),
    Mutant("rope", "Counts positions from 0 itself.", ("positions[:, None, :, None]", "torch.arange(x.shape[2])[None, None, :, None]"), says="ignores the positions"),
    Mutant("rope", "Takes positions one too large.", ("positions[:, None, :, None]", "(positions + 1)[:, None, :, None]"), says="one too large"),
    Mutant("rope", "Stays at the last position of its table.", ("positions[:, None, :, None]", "positions.clamp_max(2047)[:, None, :, None]")),
    Mutant("rope", "Gives every row the positions of the first.", ("positions[:, None, :, None]", "positions[:1, None, :, None]"), says="of its own"),
    Mutant("rope", "Ignores theta.", ("theta ** (", "10_000.0 ** ("), says="theta"),
    Mutant("rope", "Forgets the sign of the exponent.", ("(-torch.arange", "(torch.arange")),
    Mutant("rope", "Computes the angles in the dtype of x.", ("positions[:, None, :, None].float() * frequencies", "positions[:, None, :, None].to(x.dtype) * frequencies.to(x.dtype)"), says="float32"),
    Mutant("rope", "Returns float32.", (".to(x.dtype)", ""), says="bfloat16"),
    Mutant("rope", "Turns the first half and copies the second.", ("b * cos + a * sin]", "b]")),
    Mutant("rope", "Works in place.", ("return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)", "x[:] = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)\n    return x"), says="copy"),
    Mutant("rope", "Mixes the orders: cosines for neighbours, turning by halves.", code="""
def rope(x, positions, theta=10_000.0):
    half = x.shape[-1] // 2
    angles = positions[:, None, :, None].float() * (theta ** (-torch.arange(half).float() / half)).repeat_interleave(2)
    a, b = x.float().chunk(2, -1)
    return (x.float() * angles.cos() + torch.cat([-b, a], -1) * angles.sin()).to(x.dtype)
"""),
    Mutant("rope", "Takes the positions for those of the heads.", ("positions[:, None, :, None]", "positions[:, :, None, None]")),
    Mutant("rope", "Is right at positions 0 and 1 only, in the order of neighbours from there on.", code="""
def rope(x, positions, theta=10_000.0):
    half = x.shape[-1] // 2
    frequencies = torch.zeros(half)
    frequencies[0] = 1.0
    angles = positions[:, None, :, None].float() * frequencies
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1).to(x.dtype)
"""),
    # greedy
    Mutant("greedy", "Goes along the batch.", ("dim=-1", "dim=0")),
    Mutant("greedy", "Takes one token for the whole batch.", ("argmax(dim=-1)", "argmax()"), says="shape"),
    Mutant("greedy", "Keeps a dimension too many.", ("dim=-1", "dim=-1, keepdim=True"), says="shape"),
    Mutant("greedy", "Returns the logit.", ("logits.argmax(dim=-1)", "logits.amax(dim=-1)"), says="ids"),
    Mutant("greedy", "Takes the least probable.", ("argmax", "argmin"), says="least"),
    Mutant("greedy", "Rounds the logits to bfloat16.", ("logits.argmax", "logits.bfloat16().argmax")),
    Mutant("greedy", "Gives ids in 16 bits, too few for a vocabulary.", ("argmax(dim=-1)", "argmax(dim=-1).to(torch.int16)")),
    Mutant("greedy", "Compares magnitudes.", ("logits.argmax", "logits.abs().argmax")),
    # top_p
    Mutant("top_p", "Drops the token that crosses p.", ("before < p", "before + probabilities < p"), says="crosses"),
    Mutant("top_p", "Drops it, and empties the set when p is small.", ("before < p", "before + probabilities < p"), ("    keep[:, 0] = True\n", ""), says="NaN"),
    Mutant("top_p", "Does not scale what is kept.", ("    kept = kept / kept.sum(dim=-1, keepdim=True)\n", ""), says="sum to 1"),
    Mutant("top_p", "Leaves the tokens sorted.", (NUCLEUS, "return kept"), says="own id"),
    Mutant("top_p", "Keeps every token as probable as 1 - p.", ("before < p", "probabilities >= 1 - p")),
    Mutant("top_p", "Keeps one token more than the nucleus.", ("keep = before < p", "keep = before - torch.nn.functional.pad(probabilities, (1, 0))[:, :-1] < p")),
    Mutant("top_p", "Lets p = 0 keep nothing.", ("    keep[:, 0] = True\n", ""), says="NaN"),
    Mutant("top_p", "Sorts from the least probable.", ("descending=True", "descending=False")),
    Mutant("top_p", "Cuts nothing off.", ("before < p", "before < 1"), says="whole distribution"),
    Mutant("top_p", "Gives the cut tokens a little.", ("probabilities * keep", "probabilities * keep.float().clamp(min=1e-9)"), says="number of tokens"),
    Mutant("top_p", "Works in the dtype of the logits.", ("logits.float().softmax", "logits.softmax"), says="float32 is due"),
    Mutant("top_p", "Works in the dtype of the logits, then casts.", ("logits.float().softmax(dim=-1)", "logits.softmax(dim=-1).float()"), says="bfloat16"),
    Mutant("top_p", "Takes p for a number of tokens.", code="""
def top_p(logits, p):
    k = max(1, round(p * logits.shape[1]))
    probabilities = logits.float().softmax(-1)
    kept = probabilities * (probabilities >= probabilities.topk(k).values[:, -1:])
    return kept / kept.sum(-1, keepdim=True)
"""),
    Mutant("top_p", "Keeps what is p times as probable as the best, which is min-p.", code="""
def top_p(logits, p):
    probabilities = logits.float().softmax(-1)
    kept = probabilities * (probabilities >= p * probabilities.amax(-1, keepdim=True))
    return kept / kept.sum(-1, keepdim=True)
"""),
    Mutant("top_p", "Adds the probabilities up in the order of the ids.", code="""
def top_p(logits, p):
    probabilities = logits.float().softmax(-1)
    keep = probabilities.cumsum(-1) - probabilities < p
    kept = probabilities * keep
    return kept / kept.sum(-1, keepdim=True)
"""),
    Mutant("top_p", "Uses the first row's nucleus for all rows.", code="""
def top_p(logits, p):
    probabilities, ids = logits.float().softmax(-1).sort(-1, descending=True)
    n = int((probabilities[0].cumsum(-1) - probabilities[0] < p).sum().clamp(min=1))
    probabilities[:, n:] = 0
    return torch.zeros_like(probabilities).scatter(-1, ids, probabilities / probabilities.sum(-1, keepdim=True))
"""),
    # draw
    Mutant("draw", "Seeds from the clock as well.", ("manual_seed(seed)", "manual_seed(seed + __import__('time').time_ns() % 10**9)"), says="same seed"),
    Mutant("draw", "Takes the square of the odds.", ("multinomial(probabilities", "multinomial(probabilities**2")),
    Mutant("draw", "Takes an inverse distribution that is off by one.", code="""
def draw(probabilities, seed):
    u = torch.rand(len(probabilities), 1, generator=torch.Generator().manual_seed(seed))
    return ((probabilities.cumsum(-1) < u).sum(-1) + 1).clamp(max=probabilities.shape[1] - 1)
"""),
    Mutant("draw", "Is greedy.", (MULTINOMIAL, "probabilities.argmax(-1)"), says="greedy"),
    Mutant("draw", "Takes the softmax of probabilities.", ("multinomial(probabilities", "multinomial(probabilities.softmax(-1)"), says="probability 0"),
    Mutant("draw", "Draws all possible tokens alike.", ("multinomial(probabilities", "multinomial((probabilities > 0).float()"), says="equally often"),
    Mutant("draw", "Ignores the seed.", (", generator=generator", ""), says="same seed"),
    Mutant("draw", "Always uses the seed 0.", ("manual_seed(seed)", "manual_seed(0)"), says="another seed"),
    Mutant("draw", "Keeps a dimension too many.", ("[:, 0]", ""), says="shape"),
    Mutant("draw", "Draws one number for all rows.", (MULTINOMIAL, "(probabilities.cumsum(-1) < torch.rand(1, generator=generator)).sum(-1)")),
    Mutant("draw", "Draws once and gives every second row its neighbour's luck.", (MULTINOMIAL, "(probabilities.cumsum(-1) < torch.rand((len(probabilities) + 5) // 6, 1, generator=generator).repeat_interleave(6, 0)[: len(probabilities)]).sum(-1)")),
    Mutant("draw", "Draws one number for three rows.", (MULTINOMIAL, "(probabilities.cumsum(-1) < torch.rand((len(probabilities) + 2) // 3, 1, generator=generator).repeat_interleave(3, 0)[: len(probabilities)]).sum(-1)"), says="neighbouring rows"),
    # generate
    Mutant("generate", "Reads the first position.", ("logits[0, -1]", "logits[0, 0]"), says="last one"),
    Mutant("generate", "Returns the prompt too.", ("tokens[len(prompt) :]", "tokens"), says="prompt"),
    Mutant("generate", "Drops the stop token.", ("        tokens.append(token)\n        if token in stop_tokens:\n            break\n", "        if token in stop_tokens:\n            break\n        tokens.append(token)\n"), says="stop token"),
    Mutant("generate", "Never stops.", ("        if token in stop_tokens:\n            break\n", ""), says="after a stop token"),
    Mutant("generate", "Generates one token too many.", ("range(max_new_tokens)", "range(max_new_tokens + 1)"), says="too many"),
    Mutant("generate", "Feeds the newest token alone.", ("torch.tensor([tokens])", "torch.tensor([tokens if len(tokens) == len(prompt) else tokens[-1:]])"), says="newest"),
    Mutant("generate", "Forgets to extend the input.", ("torch.tensor([tokens])", "torch.tensor([prompt])"), says="appends"),
    Mutant("generate", "Extends the caller's prompt.", ("tokens = list(prompt)", "n = len(prompt)\n    tokens = prompt"), ("tokens[len(prompt) :]", "tokens[n:]"), says="copy"),
    Mutant("generate", "Forgets the batch dimension.", ("torch.tensor([tokens])", "torch.tensor(tokens)"), says="(1, T)"),
    Mutant("generate", "Checks the first stop token only.", ("token in stop_tokens", "token in list(stop_tokens)[:1]"), says="stop token"),
    Mutant("generate", "Stops when the prompt holds a stop token.", ("token in stop_tokens", "set(tokens) & set(stop_tokens)")),
    Mutant("generate", "Runs the model once more at the end.", ("    return tokens[len", "    forward(torch.tensor([tokens]))\n    return tokens[len"), says="once for each"),
    Mutant("generate", "Returns tensors.", ("token = int(logits[0, -1].argmax())", "token = logits[0, -1].argmax()"), says="whole numbers"),
    # naive_flops
    Mutant("naive_flops", "Starts one token late.", ("first, last = prompt_tokens, prompt_tokens + new_tokens - 1", "first, last = prompt_tokens + 1, prompt_tokens + new_tokens"), says="T + 1"),
    Mutant("naive_flops", "Feeds the last token back.", ("+ new_tokens - 1", "+ new_tokens"), says="never fed back"),
    Mutant("naive_flops", "Gives the leading terms.", (FLOPS, "return P * new_tokens**2 + 4 * A * L * new_tokens**3 // 3")),
    Mutant("naive_flops", "Forgets the prompt.", (FLOPS, "return sum_to(new_tokens)"), says="prompt"),
    Mutant("naive_flops", "Forgets the head.", ("P, A, L = config.matmul_params", "P, A, L = config.n_layers * config.layer_matmul_params"), says="head"),
    Mutant("naive_flops", "Counts q k^T only.", ("4 * A * L", "2 * A * L"), says="twice"),
    Mutant("naive_flops", "Counts one layer's attention.", ("4 * A * L", "4 * A"), says="layers"),
    Mutant("naive_flops", "Takes the model's width for A.", ("config.n_heads * config.head_dim", "config.d_model"), says="query heads"),
    Mutant("naive_flops", "Takes the causal half off.", ("4 * A * L", "2 * A * L"), ("(n * (n + 1) * (2 * n + 1) // 6)", "(n * (n + 1) * (2 * n + 1) // 6 + n * (n + 1) // 2)")),
    Mutant("naive_flops", "Counts the input embedding as work.", ("P, A, L = config.matmul_params", "P, A, L = config.parameter_count")),
    # crossover
    Mutant("crossover", "Asks one pass instead of all.", ("3 * P / (4 * A * L)", "P / (2 * A * L)"), says="one pass"),
    Mutant("crossover", "Has the factor upside down.", ("3 * P / (4", "4 * P / (3"), says="3/4"),
    Mutant("crossover", "Forgets the factor.", ("3 * P / (4 * A * L)", "P / (A * L)"), says="missing"),
    Mutant("crossover", "Forgets the layers.", ("(4 * A * L)", "(4 * A)"), says="layers"),
    Mutant("crossover", "Takes the model's width for A.", ("config.n_heads * config.head_dim", "config.d_model"), says="query heads"),
    Mutant("crossover", "Takes KV heads for A.", ("config.n_heads *", "config.n_kv_heads *"), says="KV heads"),
    Mutant("crossover", "Counts the input embedding as work.", ("config.matmul_params", "config.parameter_count")),
    # found by an adversary
    Mutant("top_p", "Keeps one more when the sum is p exactly.", ("before < p", "before <= p"), says="reached"),
    Mutant("generate", "Sees the last 64 tokens.", ("torch.tensor([tokens])", "torch.tensor([tokens[-64:]])"), says="300"),
    Mutant("naive_flops", "Adds up floats.", (FLOPS, "return int(float(sum_to(last)) - float(sum_to(first - 1)))"), says="not exact"),
]  # fmt: skip
