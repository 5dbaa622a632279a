"""Wrong answers to the exercises of chapter 8, each of which its grader must refuse."""

from minillm.grading.mutants import Mutant

FUSED = "fused = [sum(islice(operators, n)) for n in kernels]"
LONGER = "return sum(max(part, floor) for part in parts)"
GAINS = "return eager / seconds(fused, overhead), eager / seconds(work, replay), eager / seconds(fused, replay)"
BUCKET = "if prompt + steps > bucket:"
NEXT = "bucket = max(smallest, 1 << (prompt + steps - 1).bit_length())"
UNTIL = "while steps == 0 or behind > 0:"
COLUMNS = "column = torch.arange(max(smallest, 1 << (length - 1).bit_length()))"
SEEN = "return (first <= column) & (column < length)"
WRITE_K = "self.keys.index_copy_(2, position, k)"
WRITE = WRITE_K + "\n        self.values.index_copy_(2, position, v)"
ATTEND = "out = F.scaled_dot_product_attention(rows, self.keys[:, :, :S], self.values[:, :, :S], attn_mask=visible)"
ROWS = "rows = q.view(q.shape[0], k.shape[1], -1, q.shape[3])"
SHARE = "share = (tops - tops.amax(-1, keepdim=True)).exp()"
TOTAL = "total = (share * totals).sum(-1, keepdim=True)"
COMBINED = "return (share[..., None] * mixes).sum(-2) / total.clamp_min(1)"
TENSORS = "tensors = 2 * n_heads * head_dim + 2 * n_kv_heads * context * head_dim"
COST = "return batch * (element_bytes * tensors + 2 * 4 * partials + 8), batch * n_kv_heads * splits"
HEADS = "heads = kv_head * G + g"
START = "start = tl.maximum(split * SPLIT, length - window)"
END = "end = tl.minimum((split + 1) * SPLIT, length)"
BYTE = "byte = group[:, None] * HALF + tl.arange(0, HALF)[None, :]"
PLACE = "place = n[:, None, None] * (n_groups * HALF) + byte[None, :, :]"
EVEN = "even = tl.load(x + 2 * byte, mask=group[:, None] < n_groups, other=0.0)"
ODD = "odd = tl.load(x + 2 * byte + 1, mask=group[:, None] < n_groups, other=0.0)"
SCALE = "scale = tl.load(scales + n[:, None] * n_groups + group[None, :], mask=inside, other=0.0)"
ZERO = "zero = tl.load(zeros + n[:, None] * n_groups + group[None, :], mask=inside, other=0.0)"
PRODUCTS = "products = (tile >> 4).to(tl.float32) * even[None, :, :] + (tile & 15).to(tl.float32) * odd[None, :, :]"
SUMS = "sums += scale * tl.sum(products, axis=2) + (zero - 8 * scale) * tl.sum(even + odd, axis=1)[None, :]"

# Layers of another build, and what goes wrong in these when a step is repeated.
GROWING = """
class StaticLayer:
    def __init__(self, batch, n_kv_heads, columns, head_dim):
        self.keys = self.values = torch.zeros(batch, n_kv_heads, 0, head_dim)

    def attend(self, q, k, v, position, visible):
        self.keys, self.values = torch.cat([self.keys, k], 2), torch.cat([self.values, v], 2)
        return F.scaled_dot_product_attention(q, self.keys, self.values, enable_gqa=True)
"""
COUNTING = """
class StaticLayer:
    def __init__(self, batch, n_kv_heads, columns, head_dim):
        self.keys = torch.zeros(batch, n_kv_heads, columns, head_dim)
        self.values = torch.zeros_like(self.keys)
        self.length = 0

    def attend(self, q, k, v, position, visible):
        self.keys[:, :, self.length : self.length + 1] = k
        self.values[:, :, self.length : self.length + 1] = v
        self.length += 1
        S = visible.shape[-1]
        return F.scaled_dot_product_attention(
            q, self.keys[:, :, :S], self.values[:, :, :S], attn_mask=visible, enable_gqa=True
        )
"""
HEAD_BY_HEAD = """
class StaticLayer:
    def __init__(self, batch, n_kv_heads, columns, head_dim):
        self.keys = torch.zeros(batch, n_kv_heads, columns, head_dim)
        self.values = torch.zeros_like(self.keys)

    def attend(self, q, k, v, position, visible):
        self.keys.index_copy_(2, position, k)
        self.values.index_copy_(2, position, v)
        S, G = visible.shape[-1], q.shape[1] // k.shape[1]
        keys, values = (x[:, :, :S].repeat_interleave(G, dim=1) for x in (self.keys, self.values))
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=visible)
"""

MUTANTS = [
    # launch_gains
    Mutant("launch_gains", "Adds overhead to the work.", (LONGER, "return sum(part + floor for part in parts)"), says="not their sum"),
    Mutant("launch_gains", "Takes the longer of the two sums.", (LONGER, "return max(sum(parts), floor * len(parts))"), says="for each launch"),
    Mutant("launch_gains", "Gives the part that is left.", (GAINS, "return seconds(fused, overhead) / eager, seconds(work, replay) / eager, seconds(fused, replay) / eager"), says="upside down"),
    Mutant("launch_gains", "Fuses away the work of all but the first operator.", (FUSED, "fused = [next(islice(operators, n)) for n in kernels]\n    ends = [sum(kernels[:j]) for j in range(len(kernels))]\n    fused = [work[end] for end in ends]"), says="all of them"),
    Mutant("launch_gains", "Captures the eager step where both are asked for.", ("eager / seconds(fused, replay)", "eager / seconds(work, replay)"), says="both together"),
    Mutant("launch_gains", "Takes replays for free.", ("eager / seconds(work, replay)", "eager / sum(work)"), says="take time as well"),
    Mutant("launch_gains", "Multiplies the two gains.", ("eager / seconds(fused, replay)", "eager / seconds(fused, overhead) * eager / seconds(work, replay)")),
    Mutant("launch_gains", "Compares with the compiled step.", ("eager / seconds(fused, replay)", "seconds(fused, overhead) / seconds(fused, replay)"), says="eager step"),
    Mutant("launch_gains", "Takes the largest work of a kernel.", (FUSED, "fused = [max(islice(operators, n)) for n in kernels]")),
    Mutant("launch_gains", "Pays the overhead of each operator in a kernel.", ("eager / seconds(fused, overhead),", "eager / sum(max(part, n * overhead) for part, n in zip(fused, kernels)),")),
    Mutant("launch_gains", "Gives two numbers.", (GAINS, "return eager / seconds(fused, overhead), eager / seconds(work, replay)"), says="three numbers"),
    # break_even
    Mutant("break_even", "Compiles once.", (BUCKET, "if bucket == 0:"), says="program of its own"),
    Mutant("break_even", "Forgets the prompt.", (BUCKET, "if steps > bucket:"), (NEXT, "bucket = max(smallest, 1 << (steps - 1).bit_length())"), says="prompt's tokens"),
    Mutant("break_even", "Leaves the new token out.", (BUCKET, "if prompt + steps - 1 > bucket or not bucket:"), (NEXT, "bucket = max(smallest, 1 << max(0, prompt + steps - 2).bit_length())"), says="its own token"),
    Mutant("break_even", "Takes 128 columns for the bucket of 256.", (BUCKET, "if prompt + steps >= bucket:"), (NEXT, "bucket = max(smallest, 1 << (prompt + steps).bit_length())"), says="bucket of 128"),
    Mutant("break_even", "Divides what compiling takes by what an eager step takes.", ("behind += compiled - eager", "behind -= eager")),
    Mutant("break_even", "Waits in every step.", (BUCKET, "if steps < 1000:")),
    Mutant("break_even", "Gives a fraction.", (UNTIL, "return compile_s / (eager - compiled)\n    while steps == 0 or behind > 0:"), says="whole"),
    Mutant("break_even", "Asks for a lead, not for as long.", (UNTIL, "while steps == 0 or behind >= 0:")),
    Mutant("break_even", "Gives 0 where it never pays.", ("return None", "return 0"), says="None"),
    Mutant("break_even", "Knows no smallest bucket.", (NEXT, "bucket = 1 << (prompt + steps - 1).bit_length()")),
    Mutant("break_even", "Knows 128 only as the smallest.", (NEXT, "bucket = max(128, 1 << (prompt + steps - 1).bit_length())")),
    Mutant("break_even", "Compiles for every bucket from the smallest on.", (BUCKET, "while prompt + steps > bucket:"), (NEXT, "bucket = max(smallest, 2 * bucket)")),
    # visible_columns
    Mutant("visible_columns", "Takes the next bucket at a full one.", (COLUMNS, "column = torch.arange(max(smallest, 1 << length.bit_length()))"), says="has room for"),
    Mutant("visible_columns", "Makes a mask as long as the text.", (COLUMNS, "column = torch.arange(length)"), says="another program"),
    Mutant("visible_columns", "Knows no smallest bucket.", (COLUMNS, "column = torch.arange(1 << (length - 1).bit_length())"), says="at least"),
    Mutant("visible_columns", "Rounds up to a multiple of the smallest.", (COLUMNS, "column = torch.arange(-(-length // smallest) * smallest)")),
    Mutant("visible_columns", "Takes 128 for the smallest in any case.", (COLUMNS, "column = torch.arange(max(128, 1 << (length - 1).bit_length()))")),
    Mutant("visible_columns", "Shows the column after the new token.", ("column < length", "column <= length"), says="count from 0"),
    Mutant("visible_columns", "Hides the new token.", ("column < length", "column < length - 1"), says="sees itself"),
    Mutant("visible_columns", "Shows all columns.", (SEEN, "return first <= column"), says="hidden"),
    Mutant("visible_columns", "Hides what is seen.", (SEEN, "return ~((first <= column) & (column < length))"), says="True is where"),
    Mutant("visible_columns", "Leaves the new token out of the window.", ("length - window", "length - window - 1"), says="counts the new token"),
    Mutant("visible_columns", "Takes a column from the window.", ("first <= column", "first + (window is not None) <= column")),
    Mutant("visible_columns", "Knows no window.", ("first = 0 if window is None else length - window", "first = 0"), says="hides the columns before"),
    Mutant("visible_columns", "Gives numbers to add to the scores.", (SEEN, "return torch.where((first <= column) & (column < length), 0.0, -torch.inf)"), says="torch.bool"),
    # StaticLayer
    Mutant("static_attend", "Asks for the position.", (WRITE, "p = int(position)\n        self.keys[:, :, p : p + 1], self.values[:, :, p : p + 1] = k, v"), says="host wait"),
    Mutant("static_attend", "Asks for the position in a list.", (WRITE, "(p,) = position.tolist()\n        self.keys[:, :, p], self.values[:, :, p] = k[:, :, 0], v[:, :, 0]"), says="stays as it was"),
    Mutant("static_attend", "Counts the tokens in Python.", code=COUNTING, says="stays as it was"),
    Mutant("static_attend", "Appends to tensors that grow.", code=GROWING),
    Mutant("static_attend", "Writes into new tensors.", (WRITE, "self.keys = self.keys.index_copy(2, position, k)\n        self.values = self.values.index_copy(2, position, v)"), says="stays as it was"),
    Mutant("static_attend", "Picks the visible columns.", (ATTEND, "seen = visible.view(-1)\n        out = F.scaled_dot_product_attention(rows, self.keys[:, :, :S][:, :, seen], self.values[:, :, :S][:, :, seen])"), says="host wait"),
    Mutant("static_attend", "Writes where a mask says.", (WRITE, "here = torch.arange(self.keys.shape[2]) == position\n        self.keys[:, :, here], self.values[:, :, here] = k, v"), says="host wait"),
    Mutant("static_attend", "Looks at the mask.", (ATTEND, "S = int(visible.sum())\n        out = F.scaled_dot_product_attention(rows, self.keys[:, :, :S], self.values[:, :, :S])"), says="host wait"),
    Mutant("static_attend", "Hides no column.", (", attn_mask=visible", "")),
    Mutant("static_attend", "Keeps no values.", ("self.values.index_copy_(2, position, v)", "pass")),
    Mutant("static_attend", "Keeps keys in both places.", ("self.values.index_copy_(2, position, v)", "self.values.index_copy_(2, position, k)")),
    Mutant("static_attend", "Adds to what a column held.", (WRITE_K, "self.keys.index_add_(2, position, k)")),
    Mutant("static_attend", "Has memory that was never written.", ("torch.zeros(batch, n_kv_heads, columns, head_dim)", "torch.full((batch, n_kv_heads, columns, head_dim), torch.nan)"), says="finite"),
    Mutant("static_attend", "Reads all columns.", (ATTEND, "mask = F.pad(visible, (0, self.keys.shape[2] - S))\n        out = F.scaled_dot_product_attention(rows, self.keys, self.values, attn_mask=mask)"), says="no further than S"),
    Mutant("static_attend", "Copies keys and values for each query head.", code=HEAD_BY_HEAD, says="for each query head"),
    Mutant("static_attend", "Rewrites the columns by a mask.", (WRITE, "S = visible.shape[-1]\n        here = (torch.arange(S) == position)[:, None]\n        self.keys[:, :, :S] = torch.where(here, k, self.keys[:, :, :S])\n        self.values[:, :, :S] = torch.where(here, v, self.values[:, :, :S])"), says="copy none"),
    Mutant("static_attend", "Deals the heads out in turn.", (ROWS, "rows = q.view(q.shape[0], -1, k.shape[1], q.shape[3]).transpose(1, 2)"), ("return out.view(q.shape)", "return out.transpose(1, 2).reshape(q.shape)"), says="h // G"),
    # combine_splits
    Mutant("combine_splits", "Takes the mean of the splits.", (COMBINED, "return (mixes / totals.clamp_min(1e-9)[..., None]).mean(-2)"), says="totals count"),
    Mutant("combine_splits", "Weighs by tops alone.", (COMBINED, "share = share / share.sum(-1, keepdim=True)\n    return (share[..., None] * mixes / totals.clamp_min(1)[..., None]).sum(-2)"), says="times its total"),
    Mutant("combine_splits", "Subtracts no maximum.", (SHARE, "share = tops.exp()")),
    Mutant("combine_splits", "Shrinks mixes only.", (TOTAL, "total = totals.sum(-1, keepdim=True)"), says="Totals shrink"),
    Mutant("combine_splits", "Shrinks totals only.", (COMBINED, "return mixes.sum(-2) / total.clamp_min(1)"), says="Mixes shrink"),
    Mutant("combine_splits", "Divides by nothing.", (COMBINED, "return (share[..., None] * mixes).sum(-2)"), says="Divide by"),
    Mutant("combine_splits", "Divides by 0 where nothing was seen.", (COMBINED, "return (share[..., None] * mixes).sum(-2) / total"), says="NaN"),
    Mutant("combine_splits", "Takes the top of an empty split for 0.", (SHARE, "tops = torch.where(tops < -1e30, 0.0, tops)\n    share = (tops - tops.amax(-1, keepdim=True)).exp()"), says="is wrong"),
    Mutant("combine_splits", "Turns the share around.", (SHARE, "share = (tops.amax(-1, keepdim=True) - tops).exp()")),
    Mutant("combine_splits", "Takes the maximum of all rows.", (SHARE, "share = (tops - tops.max()).exp()")),
    Mutant("combine_splits", "Takes tops for totals.", (TOTAL, "total = share.sum(-1, keepdim=True)")),
    Mutant("combine_splits", "Ignores tops.", (SHARE, "share = torch.ones_like(tops)"), says="their own split's top"),
    Mutant("combine_splits", "Takes the top of the first split for the highest.", (SHARE, "share = (tops - tops[..., :1]).exp()"), says="NaN"),
    # split_attention_cost
    Mutant("split_attention_cost", "Forgets that partial results are read.", ("2 * 4 * partials", "4 * partials"), says="second one reads"),
    Mutant("split_attention_cost", "Forgets partial results.", ("2 * 4 * partials + 8", "8"), says="written and read"),
    Mutant("split_attention_cost", "Reads keys and values for each query head.", ("2 * n_kv_heads * context", "2 * n_heads * context"), says="each KV head"),
    Mutant("split_attention_cost", "Has partial results for each KV head.", ("partials = n_heads *", "partials = n_kv_heads *"), says="Each query head"),
    Mutant("split_attention_cost", "Forgets tops and totals.", ("(head_dim + 2)", "head_dim"), says="D + 2"),
    Mutant("split_attention_cost", "Reads keys alone.", ("2 * n_kv_heads * context", "n_kv_heads * context"), says="keys and values"),
    Mutant("split_attention_cost", "Has partial results in 16 bits.", ("2 * 4 * partials", "2 * element_bytes * partials"), says="float32"),
    Mutant("split_attention_cost", "Forgets queries and output.", (TENSORS, "tensors = 2 * n_kv_heads * context * head_dim"), says="Queries are read"),
    Mutant("split_attention_cost", "Forgets the lengths.", (" + 8)", ")"), says="8 bytes"),
    Mutant("split_attention_cost", "Drops the short split.", ("-(-context // split)", "context // split"), says="short one"),
    Mutant("split_attention_cost", "Reads whole splits.", ("2 * n_kv_heads * context * head_dim", "2 * n_kv_heads * splits * split * head_dim"), says="own columns"),
    Mutant("split_attention_cost", "Counts one sequence.", (COST, "return element_bytes * tensors + 2 * 4 * partials + 8, batch * n_kv_heads * splits"), says="all sequences"),
    Mutant("split_attention_cost", "Has a program for each query head.", ("batch * n_kv_heads * splits", "batch * n_heads * splits"), says="all query heads"),
    Mutant("split_attention_cost", "Has a program for each KV head.", ("batch * n_kv_heads * splits", "batch * n_kv_heads"), says="Each split"),
    # attend_split
    Mutant("attend_split", "Deals the heads out in turn.", (HEADS, "heads = kv_head + Hkv * g"), says="h // G"),
    Mutant("attend_split", "Takes head g of each KV head.", (HEADS, "heads = kv_head + g")),
    Mutant("attend_split", "Steps by the rows of the tile.", (HEADS, "heads = kv_head * ROWS + g")),
    Mutant("attend_split", "Leaves the new token out of the window.", (START, "start = tl.maximum(split * SPLIT, length - window - 1)")),
    Mutant("attend_split", "Takes a column from the window.", (START, "start = tl.maximum(split * SPLIT, length - window + 1)")),
    Mutant("attend_split", "Knows no window.", (START, "start = split * SPLIT")),
    Mutant("attend_split", "Begins the window at the first column.", (START, "start = tl.maximum(split * SPLIT, window)")),
    Mutant("attend_split", "Ends a column early.", (END, "end = tl.minimum((split + 1) * SPLIT, length - 1)")),
    Mutant("attend_split", "Ends a column late.", (END, "end = tl.minimum((split + 1) * SPLIT, length + 1)")),
    Mutant("attend_split", "Ends each split where the cache ends.", (END, "end = tl.minimum((split + 1) * SPLIT, S)"), says="NaN"),
    Mutant("attend_split", "Counts the window from the end of the split.", (START, "start = tl.maximum(split * SPLIT, (split + 1) * SPLIT - window)")),
    Mutant("attend_split", "Ends each split where the row ends.", (END, "end = length")),
    Mutant("attend_split", "Begins each split where the window begins.", (START, "start = length - window")),
    Mutant("attend_split", "Leaves out the last column of a split.", (END, "end = tl.minimum((split + 1) * SPLIT - 1, length)")),
    # int4_row
    Mutant("int4_row", "Exchanges the halves of a byte.", ("(tile >> 4).to", "(tile & 15).to"), ("(tile & 15).to", "(tile >> 4).to"), says="upper half"),
    Mutant("int4_row", "Forgets that z is the value of code 8.", ("(zero - 8 * scale)", "zero"), says="8 s is taken off"),
    Mutant("int4_row", "Forgets z.", ("(zero - 8 * scale)", "(0 - 8 * scale)"), says="z x as well"),
    Mutant("int4_row", "Takes 7 for 8.", ("8 * scale", "7 * scale"), says="neither 7 nor 9"),
    Mutant("int4_row", "Has one scale for a row.", (SCALE, "scale = tl.load(scales + n[:, None] * n_groups + 0 * group[None, :], mask=inside, other=0.0)"), says="scale of its own"),
    Mutant("int4_row", "Has one zero for a row.", (ZERO, "zero = tl.load(zeros + n[:, None] * n_groups + 0 * group[None, :], mask=inside, other=0.0)"), says="zero of its own"),
    Mutant("int4_row", "Reads behind the last group.", (EVEN, "even = tl.load(x + 2 * byte)"), says="NaN"),
    Mutant("int4_row", "Masks the scales by rows alone.", (SCALE, "scale = tl.load(scales + n[:, None] * n_groups + group[None, :], mask=n[:, None] < N, other=0.0)")),
    Mutant("int4_row", "Counts columns for bytes.", (BYTE, "byte = group[:, None] * 2 * HALF + tl.arange(0, HALF)[None, :]")),
    Mutant("int4_row", "Adds up the even columns of x only.", ("tl.sum(even + odd, axis=1)", "tl.sum(even, axis=1)")),
    Mutant("int4_row", "Multiplies in 8 bits.", ("(tile >> 4).to(tl.float32) * even[None, :, :]", "((tile >> 4) * even.to(tl.uint8)[None, :, :]).to(tl.float32)")),
    Mutant("int4_row", "Keeps the last groups only.", ("sums += scale", "sums = scale")),
    Mutant("int4_row", "Takes the first half of x for the even columns.", (EVEN, "even = tl.load(x + byte, mask=group[:, None] < n_groups, other=0.0)"), (ODD, "odd = tl.load(x + n_groups * HALF + byte, mask=group[:, None] < n_groups, other=0.0)")),
    Mutant("int4_row", "Takes all rows for the first.", (PLACE, "place = 0 * n[:, None, None] + byte[None, :, :]")),
]  # fmt: skip
