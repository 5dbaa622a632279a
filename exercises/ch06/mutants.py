"""Wrong answers to the exercises of chapter 6, each of which its grader must refuse."""

from minillm.grading.mutants import Mutant

SIZES = "for n in range(max_ngram, min_ngram - 1, -1):"
STARTS = "for start in range(len(context) - n - 1, -1, -1):"
GO_ON = "            text = list(context)\n                for i in range(count):\n                    text.append(text[start + n + i])\n                return text[len(context) :]"
SAME = "if list(context[start : start + n]) == list(context[-n:]):"
KEEP = "keep = min(held, len(text) - 1)"
ROLL = "    roll_back(keep)\n"
FIRST = "drafts = [run(list(text[keep:]))]"
FURTHER = "    while len(drafts) < count:\n        drafts.append(run(drafts[-1:]))\n"
WHILE_RIGHT = "while a < len(drafts) and drafts[a] == choices[a]:"
GREEDY = "return [*drafts[:a], choices[a]]"
TRIM = "return k - a, max(0, k - 1 - a)"
END = "text, end = list(prompt), len(prompt) + max_new_tokens"
ASK = "guesses = draft(text, min(lookahead, end - len(text) - 1))"
VERIFY = "choices = verify(text + guesses, len(guesses) + 1)"
GIVEN = "for token in accept_greedy(choices, guesses):"
STOP = "            if token in stop_tokens:\n                return text[len(prompt) :]\n"
KNOWN = "if min(target.shape[-1], drafter.shape[-1]) < n_tokens:"
LAWS = "p, q = ((logits[:, :n_tokens].float() / temperature).softmax(-1) for logits in (target, drafter))"
ACCEPT = "while a < len(drafts) and u[a] * q[a, drafts[a]] < p[a, drafts[a]]:"
RESIDUAL = "return excess / total if total > 0 else p"
CERTAIN = "        q = torch.nn.functional.one_hot(drafts, p.shape[1]).to(p.dtype)\n"
LAW = "law = p[a] if a == len(drafts) else residual(p[a], q[a])"
ROUND = "return [*drafts[:a].tolist(), draw(law)]"
POWERS = "return sum(alpha**i for i in range(lookahead + 1))"
GAINS = "speedups = [expected_tokens(alpha, k) / (k * c + 1) for k in range(longest + 1)]"
BEST = "return speedups.index(max(speedups)), max(speedups)"
KV = "kv = batch * context * 2 * config.n_layers"
PASS = "max(2 * P * batch * tokens / peak, P * element_bytes / bandwidth) + kv for tokens in (1, lookahead + 1)"
GAIN = "return expected_tokens(alpha, lookahead) * plain / verification"

# Answers of another build, and what goes wrong in these.
UNVERIFIED = """
def speculate(verify, draft, prompt, max_new_tokens, lookahead, stop_tokens):
    text, end = list(prompt), len(prompt) + max_new_tokens
    while len(text) < end:
        guesses = draft(text, min(lookahead, end - len(text) - 1))
        choices = verify(text + guesses, len(guesses) + 1)
        new = guesses[:1] + accept_greedy(choices[1:], guesses[1:]) if guesses else choices
        for token in new:
            text.append(token)
            if token in stop_tokens:
                return text[len(prompt) :]
    return text[len(prompt) :]
"""
CUT_AT_THE_END = """
def speculate(verify, draft, prompt, max_new_tokens, lookahead, stop_tokens):
    text, end = list(prompt), len(prompt) + max_new_tokens
    while len(text) < end and not (len(text) > len(prompt) and text[-1] in stop_tokens):
        guesses = draft(text, min(lookahead, end - len(text) - 1))
        text += accept_greedy(verify(text + guesses, len(guesses) + 1), guesses)
    return text[len(prompt) :]
"""
PLAIN = """
def speculate(verify, draft, prompt, max_new_tokens, lookahead, stop_tokens):
    text = list(prompt)
    while len(text) < len(prompt) + max_new_tokens:
        text += verify(text, 1)
        if text[-1] in stop_tokens:
            break
    return text[len(prompt) :]
"""
ONE_BY_ONE = """
def speculate(verify, draft, prompt, max_new_tokens, lookahead, stop_tokens):
    text, end = list(prompt), len(prompt) + max_new_tokens
    while len(text) < end:
        guesses = draft(text, min(lookahead, end - len(text) - 1))
        for i in range(len(guesses) + 1):
            token = verify(text, 1)[0]
            text.append(token)
            if token in stop_tokens:
                return text[len(prompt) :]
            if i < len(guesses) and token != guesses[i]:
                break
    return text[len(prompt) :]
"""
FROM_THE_START = """
def draft_from_cache(text, held, run, roll_back, count):
    roll_back(0)
    drafts = [run(list(text))]
    while len(drafts) < count:
        drafts.append(run(drafts[-1:]))
    return drafts
"""
TOKEN_BY_TOKEN = """
def draft_from_cache(text, held, run, roll_back, count):
    keep = min(held, len(text) - 1)
    roll_back(keep)
    for token in text[keep:]:
        last = run([token])
    drafts = [last]
    while len(drafts) < count:
        drafts.append(run(drafts[-1:]))
    return drafts
"""
ACCEPT_ALL = """
def count_accepted(p, q, drafts, u):
    rows = torch.arange(len(drafts))
    return int((u * q[rows, drafts] < p[rows, drafts]).sum())
"""
SEEN_FROM_THE_END = """
def count_accepted(p, q, drafts, u):
    rows = torch.arange(len(drafts))
    refused = (u * q[rows, drafts] >= p[rows, drafts]).nonzero()
    return int(refused[-1]) if len(refused) else len(drafts)
"""

MUTANTS = [
    # ngram_draft
    Mutant("ngram_draft", "Takes the first place.", (STARTS, "for start in range(len(context) - n):"), says="latest"),
    Mutant("ngram_draft", "Looks for the shortest n-gram first.", (SIZES, "for n in range(min_ngram, max_ngram + 1):"), says="longest"),
    Mutant("ngram_draft", "Finds the last tokens themselves.", (STARTS, "for start in range(len(context) - n, -1, -1):")),
    Mutant("ngram_draft", "Proposes what stands at the place.", ("text[start + n + i]", "text[start + n - 1 + i]"), says="what follows"),
    Mutant("ngram_draft", "Proposes from behind the next token on.", ("text[start + n + i]", "text[(start + n + 1 + i) % len(text)]")),
    Mutant("ngram_draft", "Stops where the text ends.", (GO_ON, "            return list(context[start + n : start + n + count])"), says="goes on with"),
    Mutant("ngram_draft", "Goes by places that have `count` tokens behind them.", (STARTS, "for start in range(len(context) - n - count, -1, -1):")),
    Mutant("ngram_draft", "Lets no place overlap with the last tokens.", (STARTS, "for start in range(len(context) - 2 * n, -1, -1):")),
    Mutant("ngram_draft", "Looks for one token as well.", (SIZES, "for n in range(max_ngram, 0, -1):"), says="min_ngram"),
    Mutant("ngram_draft", "Leaves min_ngram out.", (SIZES, "for n in range(max_ngram, min_ngram, -1):")),
    Mutant("ngram_draft", "Looks for max_ngram tokens only.", (SIZES, "for n in range(max_ngram, max_ngram - 1, -1):")),
    Mutant("ngram_draft", "Looks for min_ngram tokens only.", (SIZES, "for n in range(min_ngram, min_ngram - 1, -1):")),
    Mutant("ngram_draft", "Compares the first and the last token of the n-gram.", (SAME, "if context[start] == context[-n] and context[start + n - 1] == context[-1]:")),
    Mutant("ngram_draft", "Misses the very first place.", (STARTS, "for start in range(len(context) - n - 1, 0, -1):")),
    Mutant("ngram_draft", "Compares sets of tokens.", (SAME, "if set(context[start : start + n]) == set(context[-n:]):")),
    Mutant("ngram_draft", "Guesses the last token again where nothing is found.", ("    return []", "    return list(context[-1:])")),
    Mutant("ngram_draft", "Proposes one token too many.", ("for i in range(count):", "for i in range(count + 1):")),
    Mutant("ngram_draft", "Gives up where the context is short.", (SIZES, "for n in range(max_ngram if len(context) > max_ngram else 0, min_ngram - 1, -1):")),
    # draft_from_cache
    Mutant("draft_from_cache", "Never rolls back.", (ROLL, ""), says="refused"),
    Mutant("draft_from_cache", "Forgets the last draft after a full acceptance.", (FIRST, "drafts = [run(list(text[-1:] if held else text))]"), says="last of them was not run"),
    Mutant("draft_from_cache", "Keeps one token too many.", (KEEP, "keep = min(held, len(text))")),
    Mutant("draft_from_cache", "Rolls back one token too far.", (KEEP, "keep = max(0, min(held, len(text) - 1) - 1)"), says="forgets"),
    Mutant("draft_from_cache", "Believes that the cache holds all but the last token.", (KEEP, "keep = len(text) - 1")),
    Mutant("draft_from_cache", "Trusts whatever the cache holds.", (KEEP, "keep = held")),
    Mutant("draft_from_cache", "Makes the cache anew in every round.", code=FROM_THE_START, says="forgets"),
    Mutant("draft_from_cache", "Runs the whole text on top of the cache.", (FIRST, "drafts = [run(list(text))]"), says="The rest is in the cache"),
    Mutant("draft_from_cache", "Runs the missing tokens one by one.", code=TOKEN_BY_TOKEN),
    Mutant("draft_from_cache", "Runs the last draft as well.", ("    return drafts\n", "    run(drafts[-1:])\n    return drafts\n"), says="a draft takes one pass"),
    Mutant("draft_from_cache", "Runs all drafts in each further pass.", ("drafts.append(run(drafts[-1:]))", "drafts.append(run(drafts))"), says="in the cache"),
    Mutant("draft_from_cache", "Feeds the last confirmed token again and again.", ("drafts.append(run(drafts[-1:]))", "drafts.append(run(list(text[-1:])))")),
    Mutant("draft_from_cache", "Drafts one token only.", (FURTHER, ""), says="passes"),
    Mutant("draft_from_cache", "Gives the text as well.", ("    return drafts\n", "    return [*text, *drafts]\n")),
    Mutant("draft_from_cache", "Rolls back after the first pass.", (ROLL, ""), (FIRST, "drafts = [run(list(text[keep:]))]\n    roll_back(keep)")),
    # accept_greedy
    Mutant("accept_greedy", "Forgets the bonus token.", (GREEDY, "return [*drafts[:a], choices[a]][: max(1, len(drafts))]"), says="for free"),
    Mutant("accept_greedy", "Gives accepted drafts alone.", (GREEDY, "return list(drafts[:a])"), says="target's own"),
    Mutant("accept_greedy", "Goes on behind a wrong draft.", (GREEDY, "return [x for x, y in zip(drafts, choices) if x == y] + [choices[-1]]"), says="another text"),
    Mutant("accept_greedy", "Keeps the refused draft.", (GREEDY, "return list(drafts[: a + 1]) if a < len(drafts) else [*drafts, choices[a]]"), says="not the refused draft"),
    Mutant("accept_greedy", "Gives every choice of the target.", (GREEDY, "return list(choices)"), says="behind a wrong draft"),
    Mutant("accept_greedy", "Takes the first draft unverified.", ("    a = 0\n", "    a = min(1, len(drafts))\n"), says="verified too"),
    Mutant("accept_greedy", "Compares with the choice behind the draft.", ("drafts[a] == choices[a]:", "drafts[a] == choices[a + 1]:")),
    Mutant("accept_greedy", "Ends with the last choice.", (GREEDY, "return [*drafts[:a], choices[-1]]"), says="first refused place"),
    Mutant("accept_greedy", "Takes token 0 for no token.", (WHILE_RIGHT, "while a < len(drafts) and drafts[a] and drafts[a] == choices[a]:")),
    Mutant("accept_greedy", "Accepts all or nothing.", (GREEDY, "return [*drafts, choices[-1]] if a == len(drafts) else [choices[0]]")),
    Mutant("accept_greedy", "Fails where nothing was drafted.", (GREEDY, "return [*drafts[:a], choices[a]] if drafts else []")),
    Mutant("accept_greedy", "Accepts a draft that the target chose anywhere.", (WHILE_RIGHT, "while a < len(drafts) and drafts[a] in choices:")),
    # tokens_to_trim
    Mutant("tokens_to_trim", "Trims k from the target's.", ("return k - a,", "return k,"), says="What was accepted stays"),
    Mutant("tokens_to_trim", "Trims one too few from the target's.", ("return k - a,", "return max(0, k - 1 - a),"), says="all k drafts"),
    Mutant("tokens_to_trim", "Trims both alike.", (TRIM, "return k - a, k - a"), says="last draft"),
    Mutant("tokens_to_trim", "Trims -1 after a full acceptance.", ("max(0, k - 1 - a)", "k - 1 - a"), says="lacks one"),
    Mutant("tokens_to_trim", "Trims a token that the target never ran.", ("return k - a,", "return k - a + 1,")),
    Mutant("tokens_to_trim", "Says how many stay.", (TRIM, "return a, min(a, k - 1)"), says="how many stay"),
    Mutant("tokens_to_trim", "Exchanges the two.", (TRIM, "return max(0, k - 1 - a), k - a"), says="target's cache"),
    Mutant("tokens_to_trim", "Trims only where all is refused.", (TRIM, "return k * (a == 0), (k - 1) * (a == 0)")),
    Mutant("tokens_to_trim", "Gives one number.", (TRIM, "return k - a"), says="two numbers"),
    # speculate
    Mutant("speculate", "Forgets the target's own token.", (GIVEN, "for token in accept_greedy(choices, guesses)[: max(1, len(guesses))]:"), says="text"),
    Mutant("speculate", "Takes the first guess unverified.", code=UNVERIFIED, says="does not belong"),
    Mutant("speculate", "Verifies as many places as there are guesses.", (VERIFY, "choices = verify(text + guesses, max(1, len(guesses)))"), says="each guess is verified"),
    Mutant("speculate", "Keeps all guesses.", (GIVEN, "for token in [*guesses, choices[-1]]:"), says="does not belong"),
    Mutant("speculate", "Looks for a stop token at the end of a round only.", code=CUT_AT_THE_END, says="once more"),
    Mutant("speculate", "Drops the stop token.", (STOP, "            if token in stop_tokens:\n                return text[len(prompt) : -1]\n"), says="kept as the last"),
    Mutant("speculate", "Keeps what was accepted behind a stop token.", (STOP, ""), ("    while len(text) < end:\n", "    while len(text) < end and not set(text[len(prompt):]) & set(stop_tokens):\n"), says="not kept"),
    Mutant("speculate", "Knows no stop tokens.", (STOP, ""), says="once more"),
    Mutant("speculate", "Stops at a stop token of the prompt.", ("    while len(text) < end:\n", "    while len(text) < end and not text[-1] in stop_tokens:\n")),
    Mutant("speculate", "Stops only where a guess is a stop token.", ("if token in stop_tokens:", "if token in stop_tokens and token in guesses:")),
    Mutant("speculate", "Drafts beyond the request.", (ASK, "guesses = draft(text, lookahead)"), says="beyond the request"),
    Mutant("speculate", "Drafts as many as are left.", ("end - len(text) - 1)", "end - len(text))"), says="beyond the request"),
    Mutant("speculate", "Drafts beyond the request, and cuts the answer.", (ASK, "guesses = draft(text, lookahead)"), ("text.append(token)", "text.append(token)\n            if len(text) == end:\n                return text[len(prompt) :]"), says="beyond the request"),
    Mutant("speculate", "Asks for fewer guesses than there is room for.", ("end - len(text) - 1)", "max(0, end - len(text) - 2))"), says="only"),
    Mutant("speculate", "Drafts twice in each round.", (ASK, ASK + "\n        " + ASK), says="once more before"),
    Mutant("speculate", "Never drafts.", code=PLAIN, says="drafts first"),
    Mutant("speculate", "Runs the target for each guess.", code=ONE_BY_ONE, says="guesses"),
    Mutant("speculate", "Gives the prompt as well.", ("                return text[len(prompt) :]\n    return text[len(prompt) :]", "                return text\n    return text"), says="no part of the answer"),
    Mutant("speculate", "Drafts after the prompt alone.", (ASK, "guesses = draft(list(prompt), min(lookahead, end - len(text) - 1))"), says="draft gets a text"),
    Mutant("speculate", "Lets the drafter see its refused guesses.", (END, END + "\n    seen = list(prompt)"), (ASK, "guesses = draft(seen, min(lookahead, end - len(text) - 1))\n        seen = seen + guesses"), says="draft gets a text"),
    Mutant("speculate", "Ends where the drafter has no guess.", (VERIFY, "if not guesses and lookahead and end - len(text) > 1:\n            break\n        " + VERIFY), says="before the answer has ended"),
    Mutant("speculate", "Gives one token fewer.", ("len(prompt) + max_new_tokens", "len(prompt) + max_new_tokens - 1")),
    Mutant("speculate", "Takes one round's tokens as the answer.", ("            text.append(token)\n", "            text.append(token)\n            end = min(end, len(prompt) + len(guesses) + 1)\n")),
    # laws
    Mutant("laws", "Gives the drafter no temperature.", (LAWS, "p, q = (target[:, :n_tokens].float() / temperature).softmax(-1), drafter[:, :n_tokens].float().softmax(-1)"), says="q is wrong. No temperature"),
    Mutant("laws", "Gives the target no temperature.", (LAWS, "p, q = target[:, :n_tokens].float().softmax(-1), (drafter[:, :n_tokens].float() / temperature).softmax(-1)"), says="p is wrong. No temperature"),
    Mutant("laws", "Knows no temperature.", (" / temperature).softmax", ").softmax"), says="No temperature"),
    Mutant("laws", "Multiplies by the temperature.", ("/ temperature", "* temperature"), says="divided"),
    Mutant("laws", "Takes the drafter for greedy.", ("    return p, q\n", "    return p, torch.nn.functional.one_hot(q.argmax(-1), n_tokens).float()\n"), says="most probable tokens"),
    Mutant("laws", "Cuts after the softmax.", (LAWS, "p, q = ((logits.float() / temperature).softmax(-1)[:, :n_tokens] for logits in (target, drafter))"), says="before the softmax"),
    Mutant("laws", "Cuts the longer law to the shorter.", (LAWS, "n = min(target.shape[-1], drafter.shape[-1])\n    p, q = ((logits[:, :n].float() / temperature).softmax(-1) for logits in (target, drafter))"), says="shape"),
    Mutant("laws", "Computes in the dtype of the logits.", (LAWS, "p, q = ((logits[:, :n_tokens] / temperature).softmax(-1).float() for logits in (target, drafter))")),
    Mutant("laws", "Gives laws in the dtype of the logits.", (".float() / temperature", " / temperature")),
    Mutant("laws", "Takes exponentials that overflow.", (LAWS, "p, q = ((logits[:, :n_tokens].float() / temperature).exp() for logits in (target, drafter))\n    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)"), says="NaN"),
    Mutant("laws", "Refuses no other vocabulary.", (KNOWN, "if False:"), says="vocabulary"),
    Mutant("laws", "Looks at the drafter's vocabulary only.", (KNOWN, "if drafter.shape[-1] < n_tokens:"), says="vocabulary"),
    Mutant("laws", "Fills a smaller vocabulary with zeros.", (KNOWN, "drafter = torch.nn.functional.pad(drafter, (0, max(0, n_tokens - drafter.shape[-1])))\n    if target.shape[-1] < n_tokens:"), says="vocabulary"),
    Mutant("laws", "Refuses padded logits.", (KNOWN, "if target.shape[-1] != drafter.shape[-1]:")),
    Mutant("laws", "Exchanges the two.", ("    return p, q\n", "    return q, p\n")),
    Mutant("laws", "Makes a law of each column.", (".softmax(-1)", ".softmax(0)")),
    # count_accepted
    Mutant("count_accepted", "Takes q / p.", (ACCEPT, "while a < len(drafts) and u[a] * p[a, drafts[a]] < q[a, drafts[a]]:")),
    Mutant("count_accepted", "Counts all that are accepted, also behind a refused one.", code=ACCEPT_ALL, says="nothing counts"),
    Mutant("count_accepted", "Counts up to the last that is refused.", code=SEEN_FROM_THE_END),
    Mutant("count_accepted", "Accepts with probability p.", ("u[a] * q[a, drafts[a]] <", "u[a] <"), says="not p"),
    Mutant("count_accepted", "Accepts where u is larger.", ("u[a] * q[a, drafts[a]] < p", "u[a] * q[a, drafts[a]] >= p"), says="smaller"),
    Mutant("count_accepted", "Accepts where p is at least q.", ("u[a] * q[a, drafts[a]] < p", "q[a, drafts[a]] <= p"), says="Chance decides"),
    Mutant("count_accepted", "Accepts a token of p = 0 where u is 0.", ("* q[a, drafts[a]] < p", "* q[a, drafts[a]] <= p"), says="never accepted"),
    Mutant("count_accepted", "Takes the law after the draft.", ("< p[a, drafts[a]]", "< p[a + 1, drafts[a]]")),
    Mutant("count_accepted", "Adds the target's own token.", ("    return a\n", "    return a + 1\n"), says="does not count"),
    Mutant("count_accepted", "Adds a little to q.", ("u[a] * q[a, drafts[a]]", "u[a] * (q[a, drafts[a]] + 1e-8)")),
    Mutant("count_accepted", "Takes the first u for all.", ("u[a] *", "u[0] *")),
    Mutant("count_accepted", "Compares with the most probable token.", (ACCEPT, "while a < len(drafts) and p[a].argmax() == drafts[a]:")),
    Mutant("count_accepted", "Takes the largest of q.", ("q[a, drafts[a]]", "q[a].max()")),
    Mutant("count_accepted", "Accepts half of what it should.", ("u[a] * q", "2 * u[a] * q")),
    Mutant("count_accepted", "Draws numbers of its own.", ("u[a] * q", "float(torch.rand(1)) * q")),
    # residual
    Mutant("residual", "Does not divide by the sum.", (RESIDUAL, "return excess if total > 0 else p"), says="divide by the sum"),
    Mutant("residual", "Takes the difference without its sign.", ("(p - q).clamp_min(0)", "(p - q).abs()"), says="not the difference"),
    Mutant("residual", "Takes q - p.", ("(p - q)", "(q - p)"), says="not q - p"),
    Mutant("residual", "Gives p.", (RESIDUAL, "return p"), says="taken off"),
    Mutant("residual", "Gives p without the tokens that q has.", ("(p - q).clamp_min(0)", "p * (q == 0)")),
    Mutant("residual", "Divides 0 by 0.", (RESIDUAL, "return excess / total"), says="NaN"),
    Mutant("residual", "Looks for equal laws only.", (RESIDUAL, "return p if torch.equal(p, q) else excess / total"), says="NaN"),
    Mutant("residual", "Adds a little below the line.", (RESIDUAL, "return excess / (total + 1e-8)")),
    Mutant("residual", "Adds a little to each.", (RESIDUAL, "excess = excess + 1e-8\n    return excess / excess.sum()")),
    Mutant("residual", "Takes small sums for none.", ("if total > 0 else", "if total > 1e-6 else")),
    Mutant("residual", "Takes a softmax.", (RESIDUAL, "return excess.softmax(-1)"), says="softmax"),
    Mutant("residual", "Gives all tokens the same chance where the laws are equal.", ("else p", "else torch.full_like(p, 1 / len(p))")),
    Mutant("residual", "Gives nothing where the laws are equal.", ("else p", "else excess")),
    Mutant("residual", "Divides by the largest.", ("excess.sum()", "excess.max()")),
    # sampled_round
    Mutant("sampled_round", "Draws from p after a refusal.", (LAW, "law = p[a]"), says="what was just refused"),
    Mutant("sampled_round", "Draws from the drafter's law after a refusal.", (LAW, "law = p[a] if a == len(drafts) else q[a]")),
    Mutant("sampled_round", "Draws from p[k] in any case.", (LAW, "law = p[-1]"), says="p[a], not p[k]"),
    Mutant("sampled_round", "Takes the residual of the next place.", ("residual(p[a], q[a])", "residual(p[a + 1], q[a])")),
    Mutant("sampled_round", "Takes the residual of the first place.", ("residual(p[a], q[a])", "residual(p[0], q[0])")),
    Mutant("sampled_round", "Forgets the bonus token.", (ROUND, "return [*drafts[:a].tolist(), draw(law)][: max(1, len(drafts))]"), says="one token more"),
    Mutant("sampled_round", "Takes the residual of the last place for the bonus token.", (LAW, "law = residual(p[min(a, len(drafts) - 1)], q[min(a, len(drafts) - 1)]) if len(drafts) else p[0]"), says="nothing was refused"),
    Mutant("sampled_round", "Draws the bonus token from the place before.", (LAW, "law = p[max(0, a - 1)] if a == len(drafts) else residual(p[a], q[a])"), says="p[k]"),
    Mutant("sampled_round", "Keeps the refused draft.", (ROUND, "return [*drafts[: a + 1].tolist(), draw(law)]"), says="no part"),
    Mutant("sampled_round", "Keeps all drafts.", (ROUND, "return [*drafts.tolist(), draw(law)]")),
    Mutant("sampled_round", "Takes certain drafts for evenly drawn.", (CERTAIN, "        q = torch.full_like(p[: len(drafts)], 1 / p.shape[1])\n")),
    Mutant("sampled_round", "Takes certain drafts for drawn from p.", (CERTAIN, "        q = p[: len(drafts)]\n")),
    Mutant("sampled_round", "Accepts certain drafts where they are most probable.", (CERTAIN, CERTAIN + "        u = 1.0 - (p[: len(drafts)].argmax(-1) == drafts).to(p.dtype)\n")),
    Mutant("sampled_round", "Draws from p after a certain draft was refused.", (CERTAIN, CERTAIN + "        a = count_accepted(p, q, drafts, u)\n        return [*drafts[:a].tolist(), draw(p[a])]\n"), says="refused"),
    Mutant("sampled_round", "Fails where q is None.", ("    if q is None:\n" + CERTAIN, "")),
    Mutant("sampled_round", "Draws a token for each case.", (LAW, LAW + "\n    draw(p[a])"), says="2 times"),
    Mutant("sampled_round", "Draws nothing, and takes the most probable.", ("draw(law)]", "int(law.argmax())]"), says="0 times"),
    Mutant("sampled_round", "Accepts all or nothing.", ("a = count_accepted(p, q, drafts, u)", "a = count_accepted(p, q, drafts, u)\n    a = a if a == len(drafts) else 0")),
    Mutant("sampled_round", "Accepts what it should refuse where the ratio is large enough.", ("a = count_accepted(p, q, drafts, u)", "a = count_accepted(p, q, drafts, u / 2)")),
    Mutant("sampled_round", "Draws from what is no law.", ("residual(p[a], q[a])", "(p[a] - q[a]).clamp_min(0)"), says="no law"),
    Mutant("sampled_round", "Puts the drawn token first.", (ROUND, "return [draw(law), *drafts[:a].tolist()]")),
    # expected_tokens
    Mutant("expected_tokens", "Forgets the target's own token.", (POWERS, "return sum(alpha**i for i in range(1, lookahead + 1))"), says="target's own"),
    Mutant("expected_tokens", "Takes the guesses for independent.", (POWERS, "return 1 + alpha * lookahead"), says="powers of alpha"),
    Mutant("expected_tokens", "Forgets the last guess.", (POWERS, "return sum(alpha**i for i in range(max(1, lookahead)))")),
    Mutant("expected_tokens", "Counts one guess too many.", ("range(lookahead + 1)", "range(lookahead + 2)"), says="not one more"),
    Mutant("expected_tokens", "Divides by 0 at alpha = 1.", (POWERS, "return (1 - alpha ** (lookahead + 1)) / (1 - alpha)"), says="ZeroDivisionError"),
    Mutant("expected_tokens", "Adds a little to prevent it.", (POWERS, "return (1 - alpha ** (lookahead + 1)) / (1 - alpha + 1e-4)")),
    Mutant("expected_tokens", "Gives 1 at alpha = 1.", (POWERS, "return sum(alpha**i for i in range(lookahead + 1)) if alpha < 1 else 1.0")),
    Mutant("expected_tokens", "Gives the chance that all are right.", (POWERS, "return alpha**lookahead"), says="all are right"),
    Mutant("expected_tokens", "Gives the wait for the first wrong guess.", (POWERS, "return 1 / (1 - min(alpha, 0.999))")),
    # best_lookahead
    Mutant("best_lookahead", "Always drafts.", (GAINS, "speedups = [0.0, *(expected_tokens(alpha, k) / (k * c + 1) for k in range(1, longest + 1))]"), says="plain decoding is best"),
    Mutant("best_lookahead", "Forgets the target's own token.", ("expected_tokens(alpha, k) /", "(expected_tokens(alpha, k) - (k > 0)) /")),
    Mutant("best_lookahead", "Takes drafting for free.", ("(k * c + 1)", "1"), says="takes a draft step"),
    Mutant("best_lookahead", "Pays for one draft step.", ("(k * c + 1)", "(min(k, 1) * c + 1)")),
    Mutant("best_lookahead", "Pays for no pass of the target.", ("(k * c + 1)", "max(1, k * c)")),
    Mutant("best_lookahead", "Pays for one draft step too many.", ("(k * c + 1)", "((k + 1) * c + 1)")),
    Mutant("best_lookahead", "Leaves the longest out.", ("range(longest + 1)", "range(longest)"), says="longest"),
    Mutant("best_lookahead", "Takes the longest on a tie.", (BEST, "return max(range(longest + 1), key=lambda k: (speedups[k], k)), max(speedups)")),
    Mutant("best_lookahead", "Goes by tokens a round.", (BEST, "tokens = [expected_tokens(alpha, k) for k in range(longest + 1)]\n    k = tokens.index(max(tokens))\n    return k, speedups[k]")),
    Mutant("best_lookahead", "Stops at the first k that is worse than its predecessor, and takes that one.", (BEST, "k = next((k for k in range(1, longest + 1) if speedups[k] < speedups[k - 1]), longest)\n    return k, speedups[k]")),
    Mutant("best_lookahead", "Gives the lookahead alone.", (BEST, "return speedups.index(max(speedups))"), says="two numbers"),
    Mutant("best_lookahead", "Exchanges the two.", (BEST, "return max(speedups), speedups.index(max(speedups))"), says="lookahead"),
    # speedup_at_batch
    Mutant("speedup_at_batch", "Takes every pass for free.", (GAIN, "return expected_tokens(alpha, lookahead)"), says="what a round gives"),
    Mutant("speedup_at_batch", "Runs the guesses only.", ("(1, lookahead + 1)", "(1, max(1, lookahead))"), says="lookahead + 1"),
    Mutant("speedup_at_batch", "Leaves keys and values out.", (KV, "kv = 0 * 2 * config.n_layers"), says="read as well"),
    Mutant("speedup_at_batch", "Reads keys and values for every token.", (PASS, "max(2 * P * batch * tokens / peak, P * element_bytes / bandwidth) + kv * tokens for tokens in (1, lookahead + 1)"), says="however many"),
    Mutant("speedup_at_batch", "Lets the plain step wait for memory at any batch.", (GAIN, "return expected_tokens(alpha, lookahead) * (P * element_bytes / bandwidth + kv) / verification"), says="plain step may compute"),
    Mutant("speedup_at_batch", "Computes for one answer.", ("2 * P * batch * tokens", "2 * P * tokens"), says="batch x tokens"),
    Mutant("speedup_at_batch", "Reads the keys and values of one answer.", (KV, "kv = context * 2 * config.n_layers"), says="its own keys and values"),
    Mutant("speedup_at_batch", "Reads query heads.", ("n_kv_heads", "n_heads"), says="query head"),
    Mutant("speedup_at_batch", "Reads keys alone.", (KV, "kv = batch * context * config.n_layers"), says="2 of them"),
    Mutant("speedup_at_batch", "Reads the weights for each answer.", ("P * element_bytes / bandwidth) + kv", "batch * P * element_bytes / bandwidth) + kv"), says="once for all answers"),
    Mutant("speedup_at_batch", "Adds computing and reading.", (PASS, "2 * P * batch * tokens / peak + P * element_bytes / bandwidth + kv for tokens in (1, lookahead + 1)"), says="not their sum"),
    Mutant("speedup_at_batch", "Counts a FLOP for a weight.", ("max(2 * P * batch", "max(P * batch"), says="2 FLOPs"),
    Mutant("speedup_at_batch", "Believes that all guesses are right.", (GAIN, "return (lookahead + 1) * plain / verification"), says="not all of them"),
    Mutant("speedup_at_batch", "Turns the ratio around.", (GAIN, "return expected_tokens(alpha, lookahead) * verification / plain"), says="plain step's time over"),
    Mutant("speedup_at_batch", "Forgets what a round gives.", (GAIN, "return plain / verification")),
    Mutant("speedup_at_batch", "Takes all numbers for bytes of two.", ("P * element_bytes / bandwidth", "P * 2.0 / bandwidth")),
    # speculation_guesses
    Mutant("speculation_guesses", "Takes every pass for a step.", ("3.4, 1.0, 1.2", "1.0, 1.0, 1.2"), says="10 tokens"),
    Mutant("speculation_guesses", "Takes a token for a step.", ("3.4, 1.0, 1.2", "33.0, 33.0, 1.2"), says="once for all 33"),
    Mutant("speculation_guesses", "Takes the H100 for a CPU.", ("3.4, 1.0, 1.2", "3.4, 3.4, 1.2"), says="295 tokens"),
    Mutant("speculation_guesses", "Takes the drafter by its parameters.", ("3.4, 1.0, 1.2", "3.4, 1.0, 0.08"), says="layers count"),
    Mutant("speculation_guesses", "Takes a pass for faster than a step.", ("3.4, 1.0, 1.2", "3.4, 0.03, 1.2"), says="no pass"),
    Mutant("speculation_guesses", "Turns the drafter's ratio around.", ("3.4, 1.0, 1.2", "3.4, 1.0, 0.85"), says="Of the drafter"),
    Mutant("speculation_guesses", "Gives two numbers.", ("3.4, 1.0, 1.2", "3.4, 1.0"), says="three numbers"),
    Mutant("speculation_guesses", "Gives a number of 400 digits.", ("3.4, 1.0, 1.2", "10**400, 1.0, 1.2"), says="On the CPU"),
    Mutant("speculation_guesses", "Gives a number below all measure.", ("3.4, 1.0, 1.2", "3.4, 1.0, -(10**400)"), says="Of the drafter"),
]  # fmt: skip
