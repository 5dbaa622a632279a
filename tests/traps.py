"""Fifty bugs that real engines and courses shipped, and the test here that each of them would fail.

A row says what is right, in whose threads the wrong was found, and either *faults*: small changes that put the bug into this
package, each with the test that must then fail; or *cannot*: why there is no place for it yet. `put_in_faults.py` puts every
fault into a copy and shows that its test fails; `test_traps.py` keeps the table whole.

A thread `owner/name#7` is github.com/owner/name/issues/7; GitHub leads from there to a pull request of that number.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A bug to put in: `old`, which stands in the file once, becomes `new`; then `test` must fail."""

    test: str  # file::function, with [parameters] where one case will do
    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Trap:
    name: str
    right: str
    threads: tuple[str, ...]
    faults: tuple[Fault, ...] = ()
    cannot: str = ""


STAGES = "minillm/stages/"
MASK_OF_PADS = "        visible = visible & (keys >= self.pads[:, None, None])  # (T, S) -> (B, T, S)\n"
POSITIONS = "return torch.arange(start, self.length, device=self.device)[None]"
ROPE = "class RotaryEmbedding(nn.Module):"
NORM_IN_16_BITS = """class _Norm(nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


nn.RMSNorm = _Norm


"""
ROW_ALONE = "test_batching.py::test_row_in_a_ragged_batch_equals_the_row_alone"
FED = "test_traps.py::test_token_i_of_a_text_is_fed_at_position_i_in_every_stage"
WHOEVER_DRAFTS = "test_speculative.py::test_greedy_tokens_equal_plain_ones_whoever_drafts"
EXACT_LAW = "test_speculative.py::test_sampled_texts_follow_the_target_s_law_exactly"
CHI_SQUARE = "test_speculative.py::test_sampled_texts_pass_a_chi_square_test"
NO_PREFIX_CACHE = "No prefix is shared between requests yet: every request computes its whole prompt."
NO_PARALLEL = "One device holds the whole model: nothing is split over several yet."

TRAPS = {
    1: Trap(
        "position ids under left padding",
        "A row's positions count from its own first token, and no pad is seen: a row in a batch is the row alone.",
        ("unslothai/unsloth#3699", "unslothai/unsloth#4078", "huggingface/transformers#25790",
         "huggingface/transformers#18478", "huggingface/transformers#48161"),
        (
            Fault("test_batching.py::test_pads_are_seen_by_none_and_count_in_no_position",  # RoPE hides it: distances stay
                  STAGES + "static_batching.py",
                  "return (slots - self.pads[:, None]).clamp_min(0)", "return slots.expand(len(self.pads), -1)"),
            Fault(ROW_ALONE, STAGES + "static_batching.py",
                  "return (slots - self.pads[:, None]).clamp_min(0)",
                  "return slots.expand(len(self.pads), -1) if n_tokens == 1 else (slots - self.pads[:, None]).clamp_min(0)"),
            Fault(ROW_ALONE, STAGES + "static_batching.py",
                  MASK_OF_PADS, "        visible = visible[None]\n"),
        ),
    ),
    2: Trap(
        "rows of q and k in the wrong RoPE order",
        "Neighbouring pairs become half-split ones head by head, k by its own number of heads, and only where a "
        "file has them.",
        ("jzhang38/TinyLlama#24", "huggingface/transformers#31788", "ggml-org/llama.cpp#22611",
         "ggml-org/llama.cpp#7481", "rasbt/LLMs-from-scratch#746"),
        (
            Fault("test_checkpoint.py::test_gguf_gives_the_logits_of_the_model_it_was_made_from",
                  "minillm/checkpoint.py",
                  "return rows.transpose(0, 2, 1).reshape(-1)", "return rows.reshape(-1)"),
            Fault("test_checkpoint.py::test_gguf_gives_the_logits_of_the_model_it_was_made_from",
                  "minillm/checkpoint.py",
                  "half_split_order(config.n_kv_heads, config.head_dim)",
                  "half_split_order(config.n_heads, config.n_kv_heads * config.head_dim // config.n_heads)"),
            Fault("test_checkpoint.py::test_gguf_gives_the_logits_of_the_model_it_was_made_from",
                  "minillm/checkpoint.py",
                  'kind = name.split(".")[-2:-1] if config.architecture == "llama" else []',
                  'kind = name.split(".")[-2:-1] if config.architecture != "qwen2" else []'),
        ),
    ),
    3: Trap(
        "a wrong RoPE layout that the first position hides",
        "Rotation is compared at every position up to some hundreds, with an independent rotation.",
        ("NeuraLegion/shainet#111", "jmaczan/tiny-vllm#6"),
        (
            Fault("test_model.py::test_rope_is_a_complex_rotation_of_half_split_pairs", "minillm/model.py",
                  "swapped = x.roll(x.shape[-1] // 2, dims=-1)",
                  "swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)"),
            Fault("test_model.py::test_rope_differs_from_the_interleaved_order_from_position_two_on",
                  "minillm/model.py",
                  "return torch.addcmul(x * cos, swapped, sin)",
                  "order = torch.arange(x.shape[-1]).view(2, -1).T.flatten()\n"
                  "    inside = x[..., order.argsort()]\n"
                  "    return torch.addcmul(inside * cos, inside.roll(x.shape[-1] // 2, dims=-1), sin)[..., order]"),
        ),
    ),
    4: Trap(
        "RoPE scaling left out",
        "Scaled frequencies equal a reference wherever a file states them, and a kind of scaling that is not known "
        "is refused.",
        ("ggml-org/llama.cpp#8650", "ggml-org/llama.cpp#8676", "unslothai/unsloth#6197", "lablup/mlxcel#1355"),
        (
            Fault("test_model.py::test_llama3_factors_divide_the_frequencies", "minillm/model.py",
                  "if self.config.rope_factors is not None:", "if False:"),
            Fault("test_checkpoint.py::test_both_forms_of_rope_settings_are_read", "minillm/checkpoint_config.py",
                  'source.get("rope_parameters") or source.get("rope_scaling") or {}',
                  'source.get("rope_parameters") or {}'),
            Fault("test_checkpoint.py::test_gguf_gives_the_logits_of_the_model_it_was_made_from",
                  "minillm/checkpoint.py",
                  "    if _ROPE_FACTORS in file.tensors:\n", "    if False:\n"),
            Fault("test_checkpoint.py::test_llama3_factors_equal_those_of_transformers", "minillm/config.py",
                  "factors.append(1 / (blend + (1 - blend) / factor))",
                  "factors.append(1.0 if blend == 1 else factor)"),
            Fault("test_checkpoint.py::test_what_the_model_does_not_compute_is_refused_by_name",
                  "minillm/checkpoint_config.py",
                  'if kind in (None, "default"):', 'if kind != "llama3":'),
        ),
    ),
    5: Trap(
        "decoding one position late",
        "The position of a token is the number of tokens before it, in every stage and every row.",
        ("GeeeekExplorer/nano-vllm#67",),
        (
            Fault(FED, STAGES + "naive.py",  # RoPE hides this one and the next two as well
                  "return torch.arange(n_tokens, device=self.device)[None]",
                  "return torch.arange(1, n_tokens + 1, device=self.device)[None]"),
            Fault(FED, STAGES + "slotted_cache.py",
                  "return self._columns[None]", "return self._columns[None] + 1"),
            Fault(FED, STAGES + "rollback.py",
                  "return self._columns  # (B, T)", "return self._columns + 1"),
            Fault(FED, STAGES + "kv_cache.py",
                  POSITIONS, POSITIONS + " + (start > 0)"),
            Fault(FED, STAGES + "gqa.py",
                  POSITIONS, POSITIONS + " + (start > 0)"),
            Fault("test_mla.py::test_absorbed_equals_expanded_over_prefill_chunks_and_decode", STAGES + "mla.py",
                  POSITIONS, POSITIONS + " + (start > 0) * self.absorbed"),
            Fault("test_mla.py::test_greedy_tokens_are_those_of_the_formulas_and_vary", STAGES + "mla.py",
                  POSITIONS, POSITIONS + " + (start > 0)"),
        ),
    ),
    6: Trap(
        "mask or positions of a prompt that comes in chunks",
        "A prompt in chunks of any sizes gives the logits of the prompt as a whole, in every cache.",
        ("huggingface/transformers#43082", "huggingface/transformers#40324", "huggingface/transformers#47086",
         "huggingface/candle#3743", "GeeeekExplorer/nano-vllm#213"),
        (
            Fault("test_stages.py::test_prompt_in_chunks_of_every_size_equals_whole_prefill", STAGES + "naive.py",
                  ".tril(S - T)", ".tril()"),
            Fault("test_gqa.py::test_logits_equal_uncached_ones_for_chunks_of_every_size", STAGES + "naive.py",
                  "visible.triu(S - T - window + 1)", "visible.triu(1 - window)"),
            Fault("test_traps.py::test_ragged_chunks_equal_the_whole_prompt_in_slots", STAGES + "slotted_cache.py",
                  "(slot, before[slot] + i)", "(slot, i)"),
            Fault("test_traps.py::test_ragged_chunks_equal_the_whole_prompt_in_slots", STAGES + "slotted_cache.py",
                  "seen = slice(0, self.lengths[slot])",
                  "seen = slice(self.lengths[slot] - end + start, self.lengths[slot])"),
            Fault("test_traps.py::test_chunks_equal_the_whole_prompts_under_padding", STAGES + "static_batching.py",
                  "visible = keys <= queries\n",
                  "visible = (keys <= queries) & ((keys >= queries[0]) | (n_tokens == 1))\n"),
            Fault("test_speculative.py::test_a_cache_that_was_rolled_back_is_the_cache_that_never_saw_more",
                  STAGES + "rollback.py",
                  "hidden = keys > columns  # (B, T, S)", "hidden = keys > columns - columns[:, :1]"),
            Fault("test_mla.py::test_prompt_in_chunks_of_every_size_equals_the_formulas_of_the_paper",
                  STAGES + "mla.py",
                  "latents = q.shape[2], self.latents[layer, :, :, : self.length]",
                  "latents = q.shape[2], self.latents[layer, :, :, : max(self.length - 1, q.shape[2])]"),
        ),
    ),
    7: Trap(
        "a causal triangle in the upper left corner",
        "With S - T cached tokens, query i sees the keys up to S - T + i: the triangle stands in the lower right "
        "corner.",
        ("pytorch/pytorch#108108", "pytorch/pytorch#103082", "pytorch/pytorch#144858"),
        (
            Fault("test_stages.py::test_prompt_in_chunks_of_every_size_equals_whole_prefill", STAGES + "naive.py",
                  "if not windowed and T in (1, S):", "if not windowed:"),
            Fault("test_stages.py::test_cached_logits_equal_uncached_ones_at_every_position", STAGES + "naive.py",
                  "is_causal=T > 1,", "is_causal=True,"),
        ),
    ),
    8: Trap(
        "a row that sees nothing",
        "No query is left without a key: a pad sees itself. What softmax makes of an empty row differs from kernel "
        "to kernel.",
        ("pytorch/pytorch#103963", "pytorch/pytorch#109517", "pytorch/pytorch#131060", "tracel-ai/burn#4697"),
        (
            Fault("test_batching.py::test_pads_are_seen_by_none_and_count_in_no_position",
                  STAGES + "static_batching.py",
                  "(visible | (keys == queries))[:, None]", "visible[:, None]"),
        ),
    ),
    9: Trap(
        "NaN out of masked memory",
        "What a mask hides counts 0 times, and 0 times NaN is NaN: all that is read is finite, the rest is never "
        "read.",
        ("pytorch/pytorch#101967", "vllm-project/vllm#57156"),
        (
            Fault("test_stages.py::test_unused_cache_memory_never_leaks", STAGES + "kv_cache.py",
                  "v = values[..., : self.length, :].flatten(1, 2)\n        return causal_attention(q, k, v,",
                  "v = values[..., : self.length, :].flatten(1, 2) + 0 * values.mean()\n"
                  "        return causal_attention(q, k, v,"),
            Fault("test_gqa.py::test_unused_memory_never_leaks", STAGES + "gqa.py",
                  "return keys, values\n", "return keys, values + 0 * self.values[layer].sum()\n"),
            Fault("test_traps.py::test_memory_that_was_never_written_reaches_no_logit", STAGES + "mla.py",
                  "return attention(q, latents, self.up[layer], self.d_nope)",
                  "return attention(q, latents, self.up[layer], self.d_nope) + 0 * self.latents.sum()"),
            Fault("test_traps.py::test_memory_that_was_never_written_reaches_no_logit", STAGES + "quantized_cache.py",
                  "dequantize_int8(codes[:, :, : self.length], scales[:, :, : self.length])",
                  "dequantize_int8(codes, scales)[:, :, -self.length :]"),
            Fault("test_batching.py::test_fresh_memory_full_of_nan_changes_nothing", STAGES + "slotted_cache.py",
                  "while self._finite < length:", "while False:"),
            Fault("test_batching.py::test_a_neighbour_that_overflows_keeps_it_to_itself", STAGES + "slotted_cache.py",
                  "memory[:, slot, :, length : self.lengths[slot]].zero_()", "pass"),
            Fault("test_batching.py::test_a_neighbour_that_overflows_keeps_it_to_itself",
                  STAGES + "static_batching.py",
                  "row.prompt[:1] * pad + row.prompt", "[0] * pad + row.prompt"),
            Fault("test_speculative.py::test_memory_full_of_nan_reaches_no_row", STAGES + "rollback.py",
                  "self.keys = torch.zeros(shape,", "self.keys = torch.empty(shape,"),
            Fault("test_speculative.py::test_a_guess_that_overflows_spoils_no_text", STAGES + "rollback.py",
                  "k, v = k.nan_to_num(0.0, 0.0, 0.0), v.nan_to_num(0.0, 0.0, 0.0)", "pass"),
            Fault("test_speculative.py::test_a_guess_that_overflows_spoils_no_text", STAGES + "rollback.py",
                  "k.nan_to_num(0.0, 0.0, 0.0), v.nan_to_num(0.0, 0.0, 0.0)", "k.nan_to_num(0.0, 0.0, 0.0), v"),
        ),
    ),
    10: Trap(
        "query heads on the wrong KV head",
        "Query head h reads KV head h // G: neighbours share, in every cache and in a conversion.",
        ("ekzhang/jax-js#180", "onnx/onnx#7274", "apple/axlearn#842", "fkodom/grouped-query-attention-pytorch#5"),
        (
            Fault("test_model.py::test_forward_equals_the_definition_in_float64", STAGES + "naive.py",
                  "k = k.repeat_interleave(self.config.group_size, dim=1)",
                  "k = k.repeat(1, self.config.group_size, 1, 1)"),
            Fault("test_model.py::test_query_head_h_reads_kv_head_h_over_G", STAGES + "naive.py",
                  "v = v.repeat_interleave(self.config.group_size, dim=1)",
                  "v = v.repeat(1, self.config.group_size, 1, 1)"),
            Fault("test_model.py::test_query_head_h_reads_kv_head_h_over_G", STAGES + "kv_cache.py",
                  "v = values[..., : self.length, :].flatten(1, 2)",
                  "v = values[..., : self.length, :].transpose(1, 2).flatten(1, 2)"),
            Fault("test_gqa.py::test_neighbouring_query_heads_share_a_kv_head", STAGES + "gqa.py",
                  "rows = q.reshape(B, -1, G, D)", "rows = q.reshape(B, G, -1, D).transpose(1, 2)"),
            Fault("test_gqa.py::test_more_heads_compute_the_same_function", STAGES + "gqa.py",
                  "heads = heads.repeat_interleave(n_kv_heads // before, dim=0)",
                  "heads = heads.repeat(n_kv_heads // before, 1, 1)"),
            Fault("test_gqa.py::test_fewer_heads_are_the_means_of_neighbours_and_all_else_stays", STAGES + "gqa.py",
                  "heads = heads.view(n_kv_heads, before // n_kv_heads, config.head_dim, -1)",
                  "heads = heads.view(before // n_kv_heads, n_kv_heads, config.head_dim, -1).transpose(0, 1)"),
            Fault(WHOEVER_DRAFTS, STAGES + "rollback.py",
                  "rows = q.reshape(B, -1, self.config.group_size * T, D)",
                  "rows = q.view(B, self.config.group_size, -1, T, D).transpose(1, 2).flatten(2, 3)"),
        ),
    ),
    11: Trap(
        "a sliding window one too wide or too narrow",
        "A window of W is a token and the W - 1 before it, in every cache; 0 or none in a file is no window.",
        ("huggingface/transformers#29623", "ml-explore/mlx-lm#390", "unslothai/unsloth#8253"),
        (
            Fault("test_model.py::test_a_window_counts_the_current_token", STAGES + "naive.py",
                  "visible.triu(S - T - window + 1)", "visible.triu(S - T - window)"),
            Fault("test_gqa.py::test_a_window_counts_the_new_token_itself", STAGES + "gqa.py",
                  "k, v = k[:, :, -window:], v[:, :, -window:]",
                  "k, v = k[:, :, -window - 1 :], v[:, :, -window - 1 :]"),
            Fault("test_batching.py::test_a_window_slides_in_each_row_by_itself", STAGES + "static_batching.py",
                  "visible &= keys > queries - self", "visible &= keys >= queries - self"),
            Fault("test_batching.py::test_a_window_slides_in_each_row_by_itself", STAGES + "slotted_cache.py",
                  "visible &= keys >= length - window", "visible &= keys > length - window"),
            Fault(WHOEVER_DRAFTS, STAGES + "rollback.py",
                  "hidden |= keys <= columns - self", "hidden |= keys < columns - self"),
            Fault("test_checkpoint.py::test_families_differ_where_they_should", "minillm/checkpoint_config.py",
                  "sliding_window=window or None,", "sliding_window=window,"),
            Fault("test_traps.py::test_a_gguf_file_may_say_that_it_has_no_window", "minillm/checkpoint_config.py",
                  'own.get("attention.sliding_window") or None', 'own.get("attention.sliding_window")'),
        ),
    ),
    12: Trap(
        "a cache that overflows",
        "More than a cache or the positions of a model hold is refused before anything is written; guesses count "
        "too.",
        ("karpathy/nanochat#627", "1bit-MONSTER/1bit-MONSTER#646", "1bit-MONSTER/1bit-MONSTER#693",
         "Nehanth/swarmllm#31", "meta-pytorch/gpt-fast#69"),
        (
            Fault("test_stages.py::test_a_full_cache_says_so_in_one_sentence_and_stays_usable",
                  STAGES + "kv_cache.py",
                  "if start + n_tokens > self.capacity:", "if start + n_tokens > self.capacity + 1:"),
            Fault("test_gqa.py::test_a_full_cache_says_so_before_it_writes_and_stays_usable", STAGES + "gqa.py",
                  "if start + n_tokens > self.capacity:", "if start > self.capacity:"),
            Fault("test_mla.py::test_full_cache_refuses_and_keeps_what_it_has", STAGES + "mla.py",
                  "if start + n_tokens > self.capacity:", "if False:"),
            Fault("test_batching.py::test_a_cache_of_slots_refuses_more_than_a_slot_holds_before_it_writes",
                  STAGES + "slotted_cache.py",
                  "if max(after) > self.capacity:", "if min(after) > self.capacity:"),
            Fault("test_speculative.py::test_a_full_cache_says_so_in_one_sentence", STAGES + "rollback.py",
                  "if max(ends) > self.capacity:", "if min(ends) > self.capacity:"),
            Fault("test_speculative.py::test_prompt_and_answer_may_fill_the_positions_exactly",
                  STAGES + "speculative.py",
                  "min(lookahead, a.row.remaining - 1)", "min(lookahead, a.row.remaining)"),
            Fault("test_stages.py::test_prompt_and_answer_may_fill_the_model_positions_exactly",
                  "minillm/generation.py",
                  "needed = len(prompt) + max_new_tokens - 1", "needed = len(prompt) + max_new_tokens - 2"),
            Fault("test_batching.py::test_a_request_that_can_never_fit_is_refused_before_any_runs[cache]",
                  STAGES + "batching.py",
                  "if row.size > limit:", "if row.size > limit + 1:"),
        ),
    ),
    13: Trap(
        "a row that goes on after its end",
        "A row that has ended takes no token more and no chance from its sampler, whatever its neighbours still do.",
        ("mistralai/mistral-inference#270", "huggingface/transformers#31261"),
        (
            Fault("test_batching.py::test_rows_stop_at_stop_tokens_of_their_own_at_different_steps",
                  "minillm/batch.py",
                  "        if not row.finished:\n            row.add(token, value)", "        row.add(token, value)"),
            Fault("test_batching.py::test_a_sampler_sees_one_row_of_logits_a_token_and_none_after_the_end",
                  "minillm/batch.py",
                  "if row.sampler is not greedy and not row.finished]", "if row.sampler is not greedy]"),
            Fault("test_speculative.py::test_a_stop_token_inside_an_accepted_run_ends_the_answer_there",
                  STAGES + "speculative.py",
                  "if not answer.row.finished:  # a stop token", "if True:  # a stop token"),
            Fault("test_speculative.py::test_batches_of_every_size_with_stop_tokens_and_settings_of_their_own",
                  STAGES + "speculative.py",
                  "asked = [0 if a.row.finished else min(", "asked = [min("),
        ),
    ),
    14: Trap(
        "top-p without the token that crosses the mass",
        "A token is kept while the mass *before* it is below top_p.",
        ("fishaudio/fish-speech#1171", "evolutionaryscale/esm#360"),
        (
            Fault("test_sampling.py::test_top_p_keeps_the_token_that_crosses_the_mass", "minillm/sampling.py",
                  "mass_before = p.cumsum(dim=-1) - p", "mass_before = p.cumsum(dim=-1)"),
        ),
    ),
    15: Trap(
        "a filter that leaves nothing",
        "The most probable token stays whatever the settings: top_p of 0 and min_p of 1 are greedy.",
        ("ml-explore/mlx-lm#1912", "huggingface/transformers#19839", "huggingface/transformers#18976"),
        (
            Fault("test_sampling.py::test_top_p_near_0_is_greedy_and_leaves_a_token", "minillm/sampling.py",
                  "mass_before[..., 0] = -1.0  #", "pass  #"),
            Fault("test_sampling.py::test_the_strictest_filters_leave_the_most_probable_token", "minillm/sampling.py",
                  "p.masked_fill(p < min_p *", "p.masked_fill(p <= min_p *"),
        ),
    ),
    16: Trap(
        "a token of probability 0 is drawn",
        "Probabilities are float32 whatever the logits are, and a token that was filtered out never comes.",
        ("pytorch/pytorch#192812", "pytorch/pytorch#13867", "pytorch/pytorch#4858", "Lightning-AI/litgpt#2323"),
        (
            Fault("test_sampling.py::test_16_bit_logits_are_summed_in_float32", "minillm/sampling.py",
                  "scaled = logits.float()", "scaled = logits"),
            Fault("test_sampling.py::test_impossible_tokens_are_never_drawn", "minillm/sampling.py",
                  "return (p / e).argmax(dim=-1)", "return ((p + torch.finfo(p.dtype).eps) / e).argmax(dim=-1)"),
        ),
    ),
    17: Trap(
        "an exponential of 0",
        "Random numbers that round to 0 make no 0/0, and let no token of almost no probability win.",
        ("pytorch/pytorch#20179", "pytorch/pytorch#101620", "pytorch/xla#2562"),
        (
            Fault("test_sampling.py::test_exponential_of_0_picks_no_impossible_token", "minillm/sampling.py",
                  ".clamp_min_(torch.finfo(p.dtype).eps / 2)", ""),
            Fault("test_sampling.py::test_exponential_of_0_picks_no_token_of_almost_no_probability",
                  "minillm/sampling.py",
                  "torch.finfo(p.dtype).eps / 2", "torch.finfo(p.dtype).tiny"),
        ),
    ),
    18: Trap(
        "results that depend on the batch",
        "A row has the logits of the row alone, to the rounding that is derived, and the same greedy text; nothing "
        "that is rounded on purpose shares a scale across rows. (Equal to the last bit is not promised.)",
        ("vllm-project/vllm#5898", "vllm-project/vllm#6735", "vllm-project/vllm#7779", "vllm-project/vllm#51187"),
        (
            Fault(ROW_ALONE, STAGES + "static_batching.py",
                  "(visible | (keys == queries))[:, None]", "(visible | (keys == queries))[-1:, None]"),
            Fault("test_stages.py::test_rows_of_a_batched_cache_equal_rows_alone", STAGES + "kv_cache.py",
                  "values[..., new, :] = v[:, :, None]", "values[..., new, :] = v[:1, :, None]"),
            Fault("test_quantized_cache.py::test_rows_of_a_batch_equal_rows_alone", STAGES + "quantizers.py",
                  "scales = (x.abs().amax(-1, keepdim=True).float() / 127)",
                  "scales = (x.abs().amax().expand(*x.shape[:-1], 1).float() / 127)"),
            Fault("test_quantization.py::test_activations_of_a_row_are_rounded_by_that_row_alone",
                  STAGES + "quantized_linear.py",
                  "codes, scales = absmax_int8(self._rows(x))  # (M, K), (M, 1)",
                  "codes, scales = absmax_int8(self._rows(x))\n"
                  "        codes, scales = (codes * scales / scales.max()).round().char(), scales.max().expand_as(scales)"),
            Fault("test_quantization.py::test_activations_of_a_row_are_rounded_by_that_row_alone",
                  STAGES + "quantizers.py",
                  "scales = (x.abs().amax(-1, keepdim=True).float() / FP8_MAX)",
                  "scales = (x.abs().amax().expand(*x.shape[:-1], 1).float() / FP8_MAX)"),
        ),
    ),
    19: Trap(
        "speculation under another law than the sampler's",
        "p and q are what is drawn from, after temperature and filters; min(1, p/q) accepts, max(0, p - q) takes "
        "its place.",
        ("vllm-project/vllm#10198", "z-lab/dflash#74", "ohdearquant/lattice#388", "1bit-MONSTER/1bit-MONSTER#637",
         "jundot/omlx#3370"),
        (
            Fault(EXACT_LAW, STAGES + "speculative.py",
                  "accept_sampled(answer.sampler.probabilities(logits),", "accept_sampled(logits.float().softmax(-1),"),
            Fault(EXACT_LAW, STAGES + "drafters.py",
                  "chosen[b] = draw(laws[b][-1], answer.generator)",
                  "chosen[b] = draw(logits[b : b + 1].float().softmax(-1), answer.generator)"),
            Fault("test_speculative.py::test_a_draft_model_tells_the_chances_that_it_drew_by", STAGES + "drafters.py",
                  "laws[b].append(answer.sampler.probabilities(logits[b : b + 1]))",
                  "laws[b].append(logits[b : b + 1].float().softmax(-1))"),
            Fault("test_speculative.py::test_the_rule_gives_the_target_s_law_by_exact_enumeration",
                  STAGES + "speculative.py",
                  "(u * q < p)", "(u * p < q)"),
            Fault(CHI_SQUARE, STAGES + "speculative.py",
                  "rest = (p - q).clamp_min(0.0)", "rest = p.clone()"),
            Fault(CHI_SQUARE, STAGES + "speculative.py",
                  "if answer.sampler is None or answer.row.finished:", "if True:"),
            Fault("test_speculative.py::test_a_perfect_drafter_is_accepted_also_when_sampling",  # refusing all keeps the law
                  STAGES + "speculative.py",
                  "return (u * q < p).cumprod(dim=0).sum()", "return (u * q < p * 0).cumprod(dim=0).sum()"),
        ),
    ),
    20: Trap(
        "a guess that was chosen, judged as if drawn",
        "A drafter that was certain has q = 1 for its token: accepted with p, and not drawn again once refused.",
        ("jaymody/speculative-sampling#3", "jaymody/speculative-sampling#4", "jaymody/speculative-sampling#9",
         "lablup/mlxcel#902"),
        (
            Fault(EXACT_LAW, STAGES + "speculative.py",
                  "q = F.one_hot(drafts, V).to(p.dtype)", "q = p[:k]"),
            Fault(EXACT_LAW, STAGES + "speculative.py",
                  "q = F.one_hot(drafts, V).to(p.dtype)", "q = torch.full((k, V), 1 / V)"),
        ),
    ),
    21: Trap(
        "chances of two dtypes compared",
        "p and q are float32, whatever target and drafter compute in.",
        ("deepseek-ai/DeepSpec#31",),
        (
            Fault("test_speculative.py::test_chances_are_compared_in_fp32_whatever_the_dtypes_of_the_models",
                  "minillm/sampling.py",
                  "scaled = logits.float()", "scaled = logits.bfloat16()"),
        ),
    ),
    22: Trap(
        "the last accepted guess missing in the drafter's cache",
        "After a round in which all was accepted the drafter runs the last guess too: it proposes what it would "
        "say itself.",
        ("vllm-project/vllm#9730", "vllm-project/vllm#5765"),
        (
            Fault("test_speculative.py::test_a_draft_model_proposes_what_it_would_say_itself_whatever_was_refused_before",
                  STAGES + "rollback.py",
                  "fed = [context[length:] for context, length in",
                  "fed = [context[-1:] if length else context for context, length in"),
            Fault("test_speculative.py::test_the_draft_model_runs_a_token_a_pass_and_two_after_full_acceptance",
                  STAGES + "rollback.py",
                  "fed = [context[length:] for context, length in",
                  "fed = [context[-1:] if length else context for context, length in"),
        ),
    ),
    23: Trap(
        "a roll-back of the wrong length",
        "A cache that was rolled back holds what is confirmed, its last token excepted: the cache that never saw "
        "more.",
        ("lablup/mlxcel#994", "lablup/mlxcel#1002", "antirez/ds4#750"),
        (
            Fault("test_speculative.py::test_verification_is_one_pass_over_the_last_token_and_the_drafts",
                  STAGES + "rollback.py",
                  "self.roll_back([len(context) - 1 for context in contexts])",
                  "self.roll_back([len(context) - 2 for context in contexts])"),
            Fault("test_speculative.py::test_a_draft_model_proposes_what_it_would_say_itself_whatever_was_refused_before",
                  STAGES + "rollback.py",
                  "self.roll_back([len(context) - 1 for context in contexts])",
                  "self.roll_back([len(context) for context in contexts])"),
            Fault("test_speculative.py::test_a_cache_that_was_rolled_back_is_the_cache_that_never_saw_more",
                  STAGES + "rollback.py",
                  "min(held, length) for held", "max(held, length) for held"),
        ),
    ),
    24: Trap(
        "speculation on a cache that cannot take tokens back",
        "Speculation makes its own cache, which keeps every column also behind a sliding window.",
        ("ml-explore/mlx-lm#1427", "ml-explore/mlx-lm#1486"),
        (
            Fault(WHOEVER_DRAFTS, STAGES + "rollback.py",
                  "keys, values = keys[:, :, :S], values[:, :, :S]",
                  "if self.config.sliding_window is not None:\n"
                  "            values[:, :, : max(0, S - self.config.sliding_window)] = 0\n"
                  "        keys, values = keys[:, :, :S], values[:, :, :S]"),
        ),
    ),
    25: Trap(
        "a first guess that nobody checks",
        "Greedy with speculation is greedy without, token for token, also where a look-up guesses one token and is "
        "wrong.",
        ("ohdearquant/lattice#243", "ohdearquant/lattice#258", "ggml-org/llama.cpp#27975"),
        (
            Fault("test_speculative.py::test_a_lone_wrong_guess_is_checked_too", STAGES + "speculative.py",
                  "(choices[:-1] == drafts).cumprod(dim=0).sum()",
                  "(choices[1:-1] == drafts[1:]).cumprod(dim=0).sum() + (len(drafts) > 0)"),
            Fault(WHOEVER_DRAFTS, STAGES + "speculative.py",
                  "(choices[:-1] == drafts).cumprod(dim=0).sum()", "(choices[:-1] == drafts).sum()"),
        ),
    ),
    26: Trap(
        "drafter and target of different vocabularies",
        "Another vocabulary is refused before anything runs.",
        ("vllm-project/vllm#5203", "vllm-project/vllm#10913", "sgl-project/sglang#24051",
         "ggml-org/llama.cpp#3812"),
        (
            Fault("test_speculative.py::test_drafters_that_do_not_fit_are_refused", STAGES + "drafters.py",
                  "if ours.vocab_size != theirs.vocab_size:", "if ours.vocab_size > theirs.vocab_size:"),
        ),
    ),
    27: Trap(
        "padding ids that are looked up",
        "No id outside the vocabulary reaches the embedding: neither from a prompt nor from what fills up a row of "
        "guesses.",
        ("vllm-project/vllm#53977",),
        (
            Fault("test_stages.py::test_a_bad_request_is_refused_in_one_sentence", "minillm/config.py",
                  "if not 0 <= value < vocab_size:", "if not value < vocab_size:"),
            Fault("test_speculative.py::test_what_fills_up_a_row_of_guesses_is_never_looked_up",
                  STAGES + "rollback.py",
                  "places = self._columns - self._columns[:, :1]",
                  "places = torch.arange(self._columns.shape[1], device=self.device).expand_as(self._columns)"),
        ),
    ),
    28: Trap(
        "speculation that is wrong for several sampled rows",
        "Every row accepts a number of its own, by its own logits and chances: the law is tested four rows at a "
        "time.",
        ("1CatAI/1Cat-vLLM#656", "local-inference-lab/rtx6kpro#63", "meta-pytorch/gpt-fast#213"),
        (
            Fault(CHI_SQUARE, STAGES + "speculative.py",
                  "_verify(answer, logits[b, : n + 1],", "_verify(answer, logits[0, : n + 1],"),
            Fault(CHI_SQUARE, STAGES + "speculative.py",
                  "zip(tokens.split(1)[: accepted + 1], values, strict=False)",
                  "zip(tokens.split(1)[: verdicts[0][1] + 1], values, strict=False)"),
        ),
    ),
    29: Trap(
        "a seed that others use up",
        "Each request draws from a generator of its own: its text does not depend on neighbours, order or "
        "interruptions.",
        ("vllm-project/vllm#19940", "vllm-project/vllm#13196"),
        (
            Fault("test_batching.py::test_sampled_text_with_a_seed_does_not_depend_on_its_neighbours",
                  "minillm/batch.py",
                  "self.sampler = fresh(request.sampler)", "self.sampler = request.sampler"),
            Fault("test_speculative.py::test_a_sampled_row_does_not_depend_on_its_neighbours", STAGES + "drafters.py",
                  "self.generator = None if self.sampler is None else self.sampler.generator(device)",
                  "self.generator = None if self.sampler is None else torch.default_generator"),
            Fault("test_batch_command.py::test_drawn_answers_depend_on_seed_and_id_and_on_nothing_else",
                  "minillm/commands/batch.py",
                  "seed = None if args.seed is None else derived_seed(args.seed, id)",
                  "seed = None if args.seed is None else derived_seed(args.seed, number)"),
        ),
    ),
    30: Trap(
        "prefixes taken for each other by their hashes",
        "Blocks are compared by their tokens, or by a hash that does not collide.",
        ("vllm-project/vllm#8229", "vllm-project/vllm#12621", "vllm-project/vllm#29261", "waybarrios/vllm-mlx#444"),
        cannot=NO_PREFIX_CACHE,
    ),
    31: Trap(
        "a cache key that leaves something out",
        "All that changes keys and values is part of the key, and what is cut off is cut off from the hashes too.",
        ("vllm-project/vllm#44701", "vllm-project/vllm#49377", "openvinotoolkit/openvino.genai#3722"),
        cannot=NO_PREFIX_CACHE,
    ),
    32: Trap(
        "a prompt that is cached whole",
        "The last token of a prompt is always computed, as its logits are needed.",
        ("vllm-project/vllm#7753", "vllm-project/vllm#11186", "GeeeekExplorer/nano-vllm#114",
         "GeeeekExplorer/nano-vllm#117", "ai-dynamo/dynamo#13312"),
        cannot=NO_PREFIX_CACHE,
    ),
    33: Trap(
        "a hit that says other things than a miss",
        "The same tokens come with a prefix cache and without.",
        ("tenstorrent/vllm#415",),
        cannot=NO_PREFIX_CACHE,
    ),
    34: Trap(
        "bookkeeping of requests that are thrown out",
        "None is thrown out here: a request is admitted with room for its whole answer, and keeps what it has when "
        "it moves.",
        ("GeeeekExplorer/nano-vllm#211", "GeeeekExplorer/nano-vllm#217", "vllm-project/vllm#26661",
         "vllm-project/vllm#16832", "vllm-project/vllm#25538", "tenstorrent/tt-inference-server#2042"),
        (
            Fault("test_batching.py::test_the_scheduler_is_bounded_fair_and_never_stuck", STAGES + "batching.py",
                  "reserved += self.waiting.popleft().size", "reserved += len(self.waiting.popleft().prompt)"),
            Fault("test_batching.py::test_the_scheduler_is_bounded_fair_and_never_stuck", STAGES + "batching.py",
                  "return sum(row.size for row in self.running if not row.finished)",
                  "return sum(row.size for row in self.running)"),
            Fault("test_batching.py::test_requests_that_come_while_others_run_get_the_same_text",
                  STAGES + "slotted_cache.py",
                  "self._next[target] = self._next[source]", "pass"),
            Fault("test_batching.py::test_requests_that_come_while_others_run_get_the_same_text",
                  STAGES + "slotted_cache.py",
                  "self.values[:, target, :, :n] = self.values[:, source, :, :n]", "pass"),
        ),
    ),
    35: Trap(
        "lengths at the edge of a block",
        "Requests of kB - 1, kB and kB + 1 tokens, B the columns that are made ready at a time, say what they say "
        "alone.",
        ("GeeeekExplorer/nano-vllm#240", "GeeeekExplorer/nano-vllm#66", "GeeeekExplorer/nano-vllm#68"),
        (
            Fault("test_batching.py::test_lengths_at_the_edge_of_a_block_change_nothing", STAGES + "slotted_cache.py",
                  "while self._finite < length:", "while self._finite < length - 1:"),
            Fault("test_batching.py::test_lengths_at_the_edge_of_a_block_change_nothing", STAGES + "slotted_cache.py",
                  "blocks = -(-capacity // BLOCK)", "blocks = max(1, capacity // BLOCK)"),
        ),
    ),
    36: Trap(
        "a tree of prefixes whose sums do not add up",
        "Free, evictable and protected tokens are all tokens, after every operation.",
        ("sgl-project/mini-sglang#142", "sgl-project/mini-sglang#52", "sgl-project/sglang#35270",
         "sgl-project/sglang#10637", "UbiquitousLearning/mllm#656", "casys-kaist/LLMServingSim#29"),
        cannot=NO_PREFIX_CACHE,
    ),
    37: Trap(
        "padding that writes into the cache",
        "What fills a pass up writes only what stands there anyway: a repeated token goes to its own place again.",
        ("vllm-project/vllm#43810", "vllm-project/vllm#43869", "NVIDIA/TensorRT-LLM#16072"),
        (
            Fault("test_speculative.py::test_no_pass_goes_beyond_the_request_in_a_ragged_batch",
                  STAGES + "rollback.py",
                  "min(start + j, end - 1) for j", "min(start + j, self.capacity - 1) for j"),
            Fault("test_speculative.py::test_rows_that_draft_different_numbers_leave_each_other_alone",
                  STAGES + "drafters.py",
                  "fed = torch.where(send(drafts, fed.device), tokens[-1], again)[:, None]",
                  "fed = tokens[-1][:, None]"),
        ),
    ),
    38: Trap(
        "a buffer read after it was used again",
        "What is kept of a step is a copy where the next step writes in place. (There are no captured graphs yet.)",
        ("pytorch/pytorch#148439", "meta-pytorch/gpt-fast#232", "meta-pytorch/torchtune#1371"),
        (
            Fault(ROW_ALONE, STAGES + "slotted_cache.py",
                  "self._next[:n].clone(), self._slots[:n]", "self._next[:n], self._slots[:n]"),
        ),
    ),
    39: Trap(
        "characters cut in two between tokens",
        "The pieces of a stream, joined with what is flushed at the end, are the whole text; no piece ends inside "
        "a character.",
        ("ai-dynamo/dynamo#12630", "ai-dynamo/dynamo#12688", "exo-explore/exo#1691", "antonellof/ferrox#124"),
        (
            Fault("test_tokenizer.py::test_stream_of_bytes_equals_the_whole", "minillm/text_stream.py",
                  "return self._utf8.decode(bytes(BYTE_OF_LETTER[letter] for letter in text))",
                  'return bytes(BYTE_OF_LETTER[letter] for letter in text).decode("utf-8", "replace")'),
            Fault("test_tokenizer.py::test_stream_of_bytes_equals_the_whole", "minillm/text_stream.py",
                  'text = self._utf8.decode(b"", final=True)', 'text = ""'),
            Fault("test_tokenizer.py::test_stream_with_byte_fallback_equals_the_whole", "minillm/text_stream.py",
                  'if text.startswith("<0x") or (size > 8 and size & (size - 1)):',
                  "if size > 8 and size & (size - 1):"),
            Fault("test_tokenizer.py::test_stream_with_byte_fallback_equals_the_whole", "minillm/text_stream.py",
                  "piece = self._tokenizer.decode(self._window)[len(self._shown) :]\n", 'piece = ""\n'),
        ),
    ),
    40: Trap(
        "a stop string that two tokens share",
        "Only the longest end of the text that begins a stop string is held back.",
        ("vllm-project/vllm#3574", "SharpAI/SwiftLM#126", "SharpAI/SwiftLM#132", "mzau/mlx-knife#68",
         "NovaSky-AI/SkyRL#778"),
        cannot="Answers end at stop tokens only: there are no stop strings.",
    ),
    41: Trap(
        "tied embeddings that come apart",
        "A tied head is the embedding, after loading, moving and converting; a quantized one is made from it.",
        ("sgl-project/sglang#1508", "sgl-project/sglang#2009", "vllm-project/vllm#5621",
         "huggingface/transformers#43429"),
        (
            Fault("test_model.py::test_a_tied_head_is_the_embedding", "minillm/model.py",
                  "if config.tied_embeddings:", "if False:"),
            Fault("test_gqa.py::test_tied_embeddings_stay_tied", "minillm/weights.py",
                  "    if config.tied_embeddings:\n        model.head", "    if False:\n        model.head"),
            Fault("test_checkpoint.py::test_tied_checkpoint_with_a_head_of_its_own_uses_the_embedding",
                  "minillm/weights.py",
                  "    if config.tied_embeddings:\n        unexpected.discard",
                  "    if False:\n        unexpected.discard"),
            Fault("test_quantization.py::test_quantizing_changes_no_part_of_the_model_and_shares_what_stays",
                  STAGES + "quantized_linear.py",
                  "codes, scales = absmax_int8(linear.weight)",
                  "codes, scales = absmax_int8(linear.weight)\n"
                  "        linear.weight.copy_(dequantize_int8(codes, scales))"),
        ),
    ),
    42: Trap(
        "RMSNorm in 16 bits",
        "Mean and root are float32 inside, and what fp16 cannot square does no harm; a family with another norm is "
        "refused.",
        ("NVIDIA/TransformerEngine#1132", "huggingface/transformers#30236", "huggingface/transformers#25421",
         "vllm-project/vllm#29810"),
        (
            Fault("test_model.py::test_rmsnorm_in_bf16_is_computed_in_fp32_inside", "minillm/model.py",
                  ROPE, NORM_IN_16_BITS + ROPE),
            Fault("test_model.py::test_attention_and_mlp_are_fed_what_was_normalized_in_fp32", "minillm/model.py",
                  ROPE, NORM_IN_16_BITS + ROPE),
            Fault("test_model.py::test_rmsnorm_in_fp16_survives_values_whose_squares_do_not_fit", "minillm/model.py",
                  ROPE, NORM_IN_16_BITS + ROPE),
            Fault("test_model.py::test_the_known_gemma_shape_is_refused", "minillm/config.py",
                  'SUPPORTED = ("llama", "mistral", "qwen2", "qwen3")',
                  'SUPPORTED = ("llama", "mistral", "qwen2", "qwen3", "gemma3")'),
        ),
    ),
    43: Trap(
        "int4: order of the halves of a byte, size of a group",
        "What is packed comes out at its place, kernels equal the readable layer, and a group that does not divide "
        "is refused.",
        ("meta-pytorch/gpt-fast#217", "meta-pytorch/gpt-fast#124", "huggingface/optimum-quanto#274",
         "huggingface/optimum-quanto#286"),
        (
            Fault("test_quantization.py::test_two_codes_share_a_byte_the_even_column_in_its_upper_half",
                  STAGES + "quantizers.py",
                  "return codes[..., ::2] << 4 | codes[..., 1::2]", "return codes[..., 1::2] << 4 | codes[..., ::2]"),
            Fault("test_quantization.py::test_kernel_equals_readable_layer", STAGES + "quantizers.py",
                  "torch.stack((packed >> 4, packed & 15), dim=-1)",
                  "torch.stack((packed & 15, packed >> 4), dim=-1)"),
            Fault("test_quantization.py::test_what_cannot_be_quantized_is_refused_in_one_sentence",
                  STAGES + "quantization.py",
                  "if K % group_size:", "if K < group_size:"),
            Fault("test_quantization.py::test_every_single_weight_comes_out_of_the_kernel",
                  STAGES + "quantized_linear.py",
                  "torch.stack((scales, zeros), dim=-1)", "torch.stack((scales, zeros.flip(1)), dim=-1)"),
            Fault("test_quantization.py::test_int4_moves_no_number_by_more_than_half_a_scale",
                  STAGES + "quantizers.py",
                  "(groups * scales.float()[..., None] + zeros.float()[..., None])",
                  "(groups * scales.float().roll(1, -1)[..., None] + zeros.float()[..., None])"),
        ),
    ),
    44: Trap(
        "a bias that every device adds",
        "The bias of a layer that is split by its rows is added once, after the sum.",
        ("huggingface/text-generation-inference#1036", "Wenyueh/MinivLLM#80", "GeeeekExplorer/nano-vllm#99",
         "GeeeekExplorer/nano-vllm#203"),
        cannot=NO_PARALLEL,
    ),
    45: Trap(
        "fewer KV heads than devices",
        "KV heads are repeated on several devices, or that many devices are refused.",
        ("huggingface/transformers#47811", "sgl-project/sglang#20967"),
        cannot=NO_PARALLEL,
    ),
    46: Trap(
        "the softmax scale of latent attention",
        "Both forms divide by the root of d_nope + d_r, the size of a head's query. YaRN, which adds a factor, is "
        "not loaded.",
        ("vllm-project/vllm#41569", "NVIDIA/Megatron-LM#1429"),
        (
            Fault("test_mla.py::test_absorbed_equals_expanded_over_prefill_chunks_and_decode", STAGES + "mla.py",
                  "q = q * (latents.shape[3] / q.shape[3]) ** 0.5", "pass"),
            Fault("test_mla.py::test_logits_equal_those_of_transformers", STAGES + "mla.py",
                  "k = torch.cat([k, latents[..., d_c:].expand(-1, Hq, -1, -1)], dim=-1)",
                  "k = torch.cat([k, latents[..., d_c:].expand(-1, Hq, -1, -1)], dim=-1) * (q.shape[3] / d_nope) ** 0.5"),
        ),
    ),
    47: Trap(
        "keys and values that another machine computed",
        "What was sent is read again or computed again after a preemption: no stale block is used.",
        ("vllm-project/vllm#18631", "vllm-project/vllm#18411"),
        cannot="Prefill and decode run on the same device: nothing is transferred.",
    ),
    48: Trap(
        "a cache of another model's shape",
        "A cache takes heads, head size and dtype from the model that it serves, also where D is not C / Hq.",
        ("huggingface/transformers#46700",),
        (
            Fault("test_stages.py::test_cached_greedy_tokens_equal_naive_ones", STAGES + "kv_cache.py",
                  "group_size, capacity, config.head_dim)",
                  "group_size, capacity, config.d_model // config.n_heads)"),
            Fault("test_gqa.py::test_greedy_tokens_equal_naive_ones", STAGES + "gqa.py",
                  "n_kv_heads, capacity, config.head_dim)",
                  "n_kv_heads, capacity, config.d_model // config.n_heads)"),
            Fault(ROW_ALONE, STAGES + "slotted_cache.py",
                  "blocks * BLOCK, config.head_dim)", "blocks * BLOCK, config.d_model // config.n_heads)"),
            Fault(WHOEVER_DRAFTS, STAGES + "rollback.py",
                  "n_kv_heads, capacity, config.head_dim)",
                  "n_kv_heads, capacity, config.d_model // config.n_heads)"),
            Fault("test_speculative.py::test_a_drafter_of_another_dtype_and_shape_will_do", STAGES + "drafters.py",
                  "_ModelDraft(self.model, RollbackCache(self.model,",
                  "_ModelDraft(self.model, RollbackCache(model,"),
            Fault("test_quantized_cache.py::test_a_batch_decodes_through_it_with_any_weights",
                  STAGES + "quantized_cache.py",
                  "self.dtype = model.dtype", "self.dtype = torch.get_default_dtype()"),
        ),
    ),
    49: Trap(
        "a benchmark that reads its own cache",
        "Every timed run computes its prompt anew: no stage keeps anything between requests, and other engines are "
        "reset.",
        ("vllm-project/vllm docs/benchmarking/cli.md",),
        (
            Fault("test_engines.py::test_llama_cpp_forgets_before_every_answer", "benchmarks/engines.py",
                  "self.model.reset()  #", "pass  #"),
            Fault("test_stages.py::test_a_second_request_does_not_see_the_first", STAGES + "kv_cache.py",
                  "cache = KVCache(model, capacity=T + max_new_tokens - 1, batch=B)",
                  'cache = run.__dict__.setdefault("kept", KVCache(model, capacity=99, batch=B))'),
        ),
    ),
    50: Trap(
        "ITL and TPOT taken for each other",
        "ITL is each gap, TPOT a request's (last - first) / (n - 1); means weigh tokens in the one and requests in "
        "the other.",
        ("vllm-project/vllm#6531",),
        (
            Fault("test_metrics.py::test_tpot_is_the_mean_of_the_requests_own_gaps", "minillm/metrics.py",
                  "(request.tokens[-1] - request.tokens[0]) / (n - 1) if n > 1",
                  "(request.tokens[-1] - request.tokens[0]) / n if n > 1"),
            Fault("test_metrics.py::test_first_token_is_in_ttft_and_in_neither_itl_nor_tpot", "minillm/metrics.py",
                  "zip(request.tokens, request.tokens[1:], strict=False)",
                  "zip((request.start, *request.tokens), request.tokens, strict=False)"),
            Fault("test_metrics.py::test_mean_itl_weighs_tokens_and_mean_tpot_weighs_requests", "minillm/metrics.py",
                  "return _mean([gap for request in requests for gap in itl(request)])",
                  "return mean_tpot(requests)"),
        ),
    ),
}  # fmt: skip
