"""Wrong answers to the exercises of chapter 4, each of which its grader must refuse."""

from minillm.grading.mutants import Mutant, changed

PADS = "pads = [max(map(len, prompts)) - len(prompt) for prompt in prompts]"
ROW = "[0] * pad + list(prompt)"
GIVE = "return torch.tensor(rows), torch.tensor(pads)"
POSITION = "return (columns - pads[:, None]).clamp_min(0)"
NOT_AFTER = "(keys <= queries)"
NO_PAD = "(keys >= pads[:, None, None])"
SELF = "return visible | (keys == queries)"
NEW = "for row, token in enumerate(new.tolist()):"
IF_RUNNING = "            if not ended[row]:\n"
APPEND = "                answers[row].append(token)\n"
ENDED = "ended[row] = token in stop_tokens[row] or len(answers[row]) == limits[row]"
FEED = "tokens = new[:, None]"
RETIRE = "        for name in finished:\n            del self.running[name]\n"
ADMIT = "while self.waiting and len(self.running) < self.max_batch:"
TOO_LARGE = "if sum(self.running.values()) + size > self.max_tokens:\n                break"
SIZE = "size = prompt_tokens + max_new_tokens - 1"
NEVER = "if size > self.max_tokens:"
REFUSE = (
    '            raise ValueError(f"{name} may keep {size} tokens, and the cache has room for {self.max_tokens}")\n'
)
QUEUE = "        self.waiting.append((name, size))\n"
PRODUCTS = "products = max(2 * P * sum(new) / peak, P * element_bytes / bandwidth)"
TOTAL = "return products + sum(seen) * a_token / bandwidth"
FLOPS = "a_user_computes = (2 * P + 4 * A * L * context) / peak"
NEVER_THERE = "    if a_user_computes <= a_user_reads:\n        return None\n"
LEAST = "return ceil(P * weight_bytes / bandwidth / (a_user_computes - a_user_reads))"
SIZES = "sizes = [prompt + answer - 1 for prompt, answer in requests]"
SLOTS = "slots = min(len(sizes), max(0, room) // max(sizes))"
WALK = "        room -= size\n        if room < 0:\n            break\n        users += 1\n"

# Answers of another build, and what goes wrong in these.
BY_ZEROS = """
def pad_prompts(prompts):
    T = max(len(prompt) for prompt in prompts)
    tokens = torch.zeros(len(prompts), T, dtype=torch.int64)
    for row, prompt in zip(tokens, prompts):
        row[T - len(prompt):] = torch.tensor(prompt)
    return tokens, (tokens == 0).sum(1)
"""
BY_LEADING_ZEROS = BY_ZEROS.replace("(tokens == 0).sum(1)", "(tokens.cumsum(1) == 0).sum(1)")

PACKED_AWAY = """
def static_loop(step, prompts, limits, stop_tokens):
    answers, rows, tokens = [[] for _ in limits], list(range(len(limits))), prompts
    while rows:
        new = step(tokens)
        for row, token in zip(rows, new.tolist()):
            answers[row].append(token)
        going = [i for i, row in enumerate(rows) if answers[row][-1] not in stop_tokens[row] and len(answers[row]) < limits[row]]
        rows, tokens = [rows[i] for i in going], new[going][:, None]
    return answers
"""
CUT_LATER = """
def static_loop(step, prompts, limits, stop_tokens):
    columns, tokens = [], prompts
    for _ in range(max(limits)):
        tokens = step(tokens)[:, None]
        columns.append(tokens)
    answers = torch.cat(columns, 1).tolist()
    for b, answer in enumerate(answers):
        ends = [i + 1 for i, token in enumerate(answer) if token in stop_tokens[b]]
        answers[b] = answer[: min([limits[b], *ends])]
    return answers
"""
PADDED_ANSWERS = """
def static_loop(step, prompts, limits, stop_tokens):
    answers, ended, tokens = [[] for _ in limits], torch.zeros(len(limits), dtype=torch.bool), prompts
    while not ended.all():
        new = step(tokens)
        new = new.masked_fill(ended, 0)
        for b, token in enumerate(new.tolist()):
            answers[b].append(token)
            ended[b] |= token in stop_tokens[b] or len(answers[b]) >= limits[b]
        tokens = new[:, None]
    return answers
"""

SCHEDULER = """
class Scheduler:
    def __init__(self, max_batch, max_tokens):
        self.max_batch, self.free, self.queue, self.sizes, self.on = max_batch, max_tokens, [], {}, []
        self.max_tokens = max_tokens

    def submit(self, name, prompt_tokens, max_new_tokens):
        need = prompt_tokens + max_new_tokens - 1
        if need > self.max_tokens:
            raise ValueError("never fits")
        self.sizes[name] = need
        self.queue.append(name)

    def step(self, finished):
        for name in finished:
            self.on.remove(name)
            self.free += self.sizes[name]
        while self.queue and len(self.on) < self.max_batch and self.sizes[self.queue[0]] <= self.free:
            self.free -= self.sizes[self.queue[0]]
            self.on.append(self.queue.pop(0))
        return self.on
"""


HEAD = "while self.queue and len(self.on) < self.max_batch and self.sizes[self.queue[0]] <= self.free:\n            self.free -= self.sizes[self.queue[0]]\n            self.on.append(self.queue.pop(0))"
FITTING = "for name in list(self.queue):\n            if len(self.on) < self.max_batch and self.sizes[name] <= self.free:\n                self.free -= self.sizes[name]\n                self.queue.remove(name)\n                self.on.append(name)"

MUTANTS = [
    # pad_prompts
    Mutant("pad_prompts", "Pads on the right.", (ROW, "list(prompt) + [0] * pad"), says="wrong side"),
    Mutant("pad_prompts", "Gives lengths for pads.", ("torch.tensor(pads)", "torch.tensor([len(prompt) for prompt in prompts])"), says="lengths"),
    Mutant("pad_prompts", "Cuts all to the shortest.", (PADS, "pads = [0] * len(prompts)"), (ROW, "list(prompt)[-min(map(len, prompts)):]"), says="shape"),
    Mutant("pad_prompts", "Takes each token 0 for a pad.", code=BY_ZEROS, says="count columns"),
    Mutant("pad_prompts", "Takes the zeros in front of a prompt for pads.", code=BY_LEADING_ZEROS, says="count columns"),
    Mutant("pad_prompts", "Fills with -1.", ("[0] * pad", "[-1] * pad"), says="take 0"),
    Mutant("pad_prompts", "Fills with an id that no model has.", ("[0] * pad", "[10**9] * pad"), says="take 0"),
    Mutant("pad_prompts", "Turns the prompts around.", ("list(prompt)", "list(prompt)[::-1]"), says="opposite order"),
    Mutant("pad_prompts", "Gives floats.", (GIVE, "return torch.tensor(rows).float(), torch.tensor(pads)"), says="whole numbers"),
    Mutant("pad_prompts", "Gives a table of which tokens are real.", ("torch.tensor(pads)", "torch.tensor(rows) != 0"), says="whole numbers"),
    Mutant("pad_prompts", "Leaves the pads out.", (GIVE, "return torch.tensor(rows)"), says="two tensors"),
    Mutant("pad_prompts", "Adds a pad to every row.", ("max(map(len, prompts)) - len", "max(map(len, prompts)) + 1 - len"), says="shape"),
    Mutant("pad_prompts", "Gives tokens in 16 bits, too few for a vocabulary.", (GIVE, "return torch.tensor(rows, dtype=torch.int16), torch.tensor(pads)"), says="int64 is due"),
    Mutant("pad_prompts", "Gives pads in 8 bits.", (GIVE, "return torch.tensor(rows), torch.tensor(pads, dtype=torch.int8)"), says="int64 is due"),
    # padded_positions
    Mutant("padded_positions", "Counts columns, pads included.", (POSITION, "return columns.repeat(len(pads), 1)"), says="counts columns"),
    Mutant("padded_positions", "Counts tokens in the prompt, and columns in later passes.", (POSITION, "return (columns - (pads[:, None] if start == 0 else 0 * pads[:, None])).clamp_min(0)"), says="counts columns"),
    Mutant("padded_positions", "Counts columns in the prompt, and tokens in later passes.", (POSITION, "return (columns - (pads[:, None] if start else 0 * pads[:, None])).clamp_min(0)"), says="counts columns"),
    Mutant("padded_positions", "Begins at 0 in every pass.", ("torch.arange(start, start + n_tokens)", "torch.arange(n_tokens)"), says="this pass alone"),
    Mutant("padded_positions", "Gives pads negative positions.", (".clamp_min(0)", ""), says="negative"),
    Mutant("padded_positions", "Begins at 1.", (POSITION, "return (columns - pads[:, None] + 1).clamp_min(1)"), says="too large"),
    Mutant("padded_positions", "Repeats the position of the token before in decode.", (POSITION, "return (columns - pads[:, None] - int(start > 0)).clamp_min(0)"), says="too small"),
    Mutant("padded_positions", "Adds the pads.", ("columns - pads", "columns + pads"), says="take them off"),
    Mutant("padded_positions", "Takes the first row for all.", (POSITION, "return (columns - pads[:1, None]).clamp_min(0).expand(len(pads), n_tokens)")),
    Mutant("padded_positions", "Gives one row.", (POSITION, "return columns[None]"), says="shape"),
    Mutant("padded_positions", "Gives floats.", (POSITION, "return (columns - pads[:, None]).clamp_min(0).float()"), says="whole numbers"),
    Mutant("padded_positions", "Counts the real tokens of this pass alone.", (POSITION, "return ((columns >= pads[:, None]).cumsum(1) - 1).clamp_min(0)")),
    Mutant("padded_positions", "Takes a later pass for one without pads in it.", (POSITION, "return (columns - pads[:, None]).clamp_min(0) if start == 0 else torch.maximum(start - pads[:, None], torch.tensor(0)) + columns - start")),
    Mutant("padded_positions", "Has a table of 2,048 positions.", ("torch.arange(start, start + n_tokens)", "torch.arange(2048)[start : start + n_tokens]")),
    Mutant("padded_positions", "Stays at the last position that it knows.", (POSITION, f"{POSITION}.clamp_max(2047)")),
    Mutant("padded_positions", "Gives positions in 8 bits.", (POSITION, f"{POSITION}.to(torch.int8)"), says="int64 is due"),
    # padding_mask
    Mutant("padding_mask", "Lets pads be seen.", (f" & {NO_PAD}", " & (pads[:, None, None] >= 0)"), says="Pads are seen"),
    Mutant("padding_mask", "Lets pads be seen in later passes.", (NO_PAD, "((keys >= pads[:, None, None]) | (start > 0))"), says="Pads are seen"),
    Mutant("padding_mask", "Lets a token see what comes after it.", (NOT_AFTER, "(keys == keys) & (queries == queries)"), says="after itself"),
    Mutant("padding_mask", "Lets a pad see nothing.", (SELF, "return visible"), says="NaN"),
    Mutant("padding_mask", "Lets all pads of a chunk but the first see nothing.", (SELF, "return visible | ((keys == queries) & (queries == start))"), says="NaN"),
    Mutant("padding_mask", "Hides the first token of each row.", (NO_PAD, "(keys > pads[:, None, None])"), says="first token of each row is hidden"),
    Mutant("padding_mask", "Shows the last pad.", (NO_PAD, "(keys >= pads[:, None, None] - 1)"), says="last pad"),
    Mutant("padding_mask", "Hides a token from itself.", (NOT_AFTER, "(keys < queries)"), (SELF, "return visible | ((keys == queries) & (queries <= pads[:, None, None]))")),
    Mutant("padding_mask", "Lets a token see the next one.", (NOT_AFTER, "(keys <= queries + 1)"), says="the one after itself"),
    Mutant("padding_mask", "Begins the triangle of a later pass at the first key.", (NOT_AFTER, "(keys <= queries - start)"), ("(keys == queries)", "(keys == queries - start)")),
    Mutant("padding_mask", "Looks for pads on the right.", (NO_PAD, "(keys < start + n_tokens - pads[:, None, None])"), says="on the left"),
    Mutant("padding_mask", "Says True for what is hidden.", (SELF, "return ~(visible | (keys == queries))"), says="upside down"),
    Mutant("padding_mask", "Gives numbers to be added.", (SELF, "return torch.zeros(1).masked_fill(~(visible | (keys == queries)), -1e30)"), says="bools are due"),
    Mutant("padding_mask", "Gives zeros and ones.", (SELF, "return (visible | (keys == queries)).long()"), says="bools are due"),
    Mutant("padding_mask", "Gives the keys of this pass alone.", ("torch.arange(start + n_tokens)  #", "torch.arange(start, start + n_tokens)  #"), says="shape"),
    Mutant("padding_mask", "Puts a dimension of heads between.", (SELF, "return (visible | (keys == queries))[:, None]"), says="shape"),
    Mutant("padding_mask", "Masks the keys of pads in whole columns, that of the first row in all rows.", ("pads[:, None, None]", "pads[:1, None, None].expand(len(pads), 1, 1)")),
    Mutant("padding_mask", "Sees everything once something is cached.", (NOT_AFTER, "((keys <= queries) | (start > 0))"), says="after itself"),
    Mutant("padding_mask", "Exchanges queries and keys.", (NOT_AFTER, "(keys >= queries)"), says="exchanged"),
    Mutant("padding_mask", "Shows each token the pads next to it, as the last of them.", (SELF, "return visible | (keys == queries) | (keys == start)")),
    Mutant("padding_mask", "Has a table of 2,048 tokens.", (SELF, "table = torch.ones(2048, 2048, dtype=torch.bool).tril()[start : start + n_tokens, : start + n_tokens]\n    return table & (keys >= pads[:, None, None]) | (keys == queries)")),
    # static_loop
    Mutant("static_loop", "Drops the stop token.", (f"{APPEND}                {ENDED}", "                ended[row] = token in stop_tokens[row]\n                if not ended[row]:\n                    answers[row].append(token)\n                    ended[row] = len(answers[row]) == limits[row]"), says="kept as the last"),
    Mutant("static_loop", "Freezes nothing.", (IF_RUNNING, "            if True:\n"), ("ended[row] = token in", "ended[row] = ended[row] or token in"), says="takes nothing more"),
    Mutant("static_loop", "Thaws a row whose next token is no stop token.", (IF_RUNNING, "            if len(answers[row]) < limits[row]:\n")),
    Mutant("static_loop", "Knows no stop tokens.", ("token in stop_tokens[row] or ", ""), says="step"),
    Mutant("static_loop", "Runs on to the limits, and keeps it all.", ("while not all(ended):", "while not all(len(a) == n for a, n in zip(answers, limits)):"), (IF_RUNNING, "            if len(answers[row]) < limits[row]:\n")),
    Mutant("static_loop", "Ends all rows with the first that ends.", ("not all(ended)", "not any(ended)"), says="too early"),
    Mutant("static_loop", "Stops all rows at the stop tokens of any.", ("token in stop_tokens[row]", "token in set().union(*stop_tokens)"), says="too early"),
    Mutant("static_loop", "Stops all rows at those of the first.", ("token in stop_tokens[row]", "token in stop_tokens[0]")),
    Mutant("static_loop", "Gives all rows the longest limit.", ("== limits[row]", "== max(limits)")),
    Mutant("static_loop", "Gives all rows the limit of the first.", ("== limits[row]", "== limits[0]")),
    Mutant("static_loop", "Gives one token fewer.", ("== limits[row]", ">= limits[row] - 1"), says="too early"),
    Mutant("static_loop", "Gives one token more.", ("== limits[row]", "== limits[row] + 1")),
    Mutant("static_loop", "Takes token 0 for no token.", (IF_RUNNING, "            if token and not ended[row]:\n")),
    Mutant("static_loop", "Looks at the limit alone once a row has its first token.", ("token in stop_tokens[row] or", "(token in stop_tokens[row] and len(answers[row]) == 1) or")),
    Mutant("static_loop", "Feeds the prompts again.", (FEED, "tokens = prompts"), says="due"),
    Mutant("static_loop", "Feeds all tokens so far.", (FEED, "tokens = torch.cat([tokens, new[:, None]], 1)"), says="shape"),
    Mutant("static_loop", "Feeds tokens without a second dimension.", (FEED, "tokens = new"), says="shape"),
    Mutant("static_loop", "Feeds the last token of the first row to all.", (FEED, "tokens = new[:1].repeat(len(limits))[:, None]"), says="last token"),
    Mutant("static_loop", "Takes ended rows out of the batch.", code=PACKED_AWAY, says="stay in the batch"),
    Mutant("static_loop", "Runs to the longest limit and cuts afterwards.", code=CUT_LATER, says="once more"),
    Mutant("static_loop", "Fills rows that have ended with zeros.", code=PADDED_ANSWERS, says="takes nothing more"),
    Mutant("static_loop", "Marks rows that have ended with -1 in what it feeds.", (FEED, "tokens = torch.where(torch.tensor(ended), -1, new)[:, None]"), says="negative"),
    Mutant("static_loop", "Takes one step more.", ("return answers", "step(tokens)\n    return answers"), says="once more"),
    Mutant("static_loop", "Shares one list between the rows.", ("[[] for _ in limits]", "[[]] * len(limits)")),
    Mutant("static_loop", "Takes a prompt of one token for a step of decode.", (FEED, f"{FEED} if prompts.shape[1] > 1 else prompts")),
    Mutant("static_loop", "Looks at the last three tokens of the prompts.", ("    tokens = prompts\n", "    tokens = prompts[:, -3:]\n")),
    Mutant("static_loop", "Ends every row at 64 tokens.", ("len(answers[row]) == limits[row]", "len(answers[row]) == min(limits[row], 64)"), says="too early"),
    Mutant("static_loop", "Looks at two stop tokens of a row.", ("token in stop_tokens[row]", "token in list(stop_tokens[row])[:2]")),
    Mutant("static_loop", "Searches stop tokens as if they were sorted.", ("token in stop_tokens[row]", "(lambda s, i: i < len(s) and s[i] == token)(list(stop_tokens[row]), __import__('bisect').bisect_left(list(stop_tokens[row]), token))")),
    Mutant("static_loop", "Takes ids for bytes.", ("answers[row].append(token)", "answers[row].append(token % 256)")),
    # scheduler_step
    Mutant("scheduler_step", "Admits only when nothing runs: a static batch.", (ADMIT, "idle = not self.running\n        while idle and self.waiting and len(self.running) < self.max_batch:"), says="waits, the first in the queue"),
    Mutant("scheduler_step", "Frees the room of those who are done a step later.", (RETIRE, "        late, self.late = getattr(self, 'late', []), finished\n        for name in late:\n            del self.running[name]\n"), says="still runs"),
    Mutant("scheduler_step", "Admits before it forgets the finished.", (RETIRE, ""), ("        return list(self.running)", f"{RETIRE}        return list(self.running)"), says="leaves its room"),
    Mutant("scheduler_step", "Lets the finished run on.", (RETIRE, ""), says="still runs"),
    Mutant("scheduler_step", "Reserves the prompt alone.", (SIZE, "size = prompt_tokens"), says="may come to keep"),
    Mutant("scheduler_step", "Reserves the last token too.", (SIZE, "size = prompt_tokens + max_new_tokens")),
    Mutant("scheduler_step", "Reserves the last token too, in `step` alone.", (TOO_LARGE, TOO_LARGE.replace("+ size >", "+ size >="))),
    Mutant("scheduler_step", "Does not bound the tokens.", (TOO_LARGE, "pass"), says="may come to keep"),
    Mutant("scheduler_step", "Bounds each request's tokens, not their sum.", (TOO_LARGE, TOO_LARGE.replace("sum(self.running.values()) + size", "size")), says="may come to keep"),
    Mutant("scheduler_step", "Does not bound the requests.", (ADMIT, "while self.waiting:"), says="at a time"),
    Mutant("scheduler_step", "Runs one request more.", ("< self.max_batch", "<= self.max_batch"), says="at a time"),
    Mutant("scheduler_step", "Runs one request fewer.", ("< self.max_batch", "< max(1, self.max_batch - 1)"), says="waits"),
    Mutant("scheduler_step", "Admits one request a step.", (ADMIT, "if self.waiting and len(self.running) < self.max_batch:"), (TOO_LARGE, TOO_LARGE.replace("break", "return list(self.running)")), says="waits"),
    Mutant("scheduler_step", "Fills the slots of those who are done, and no others.", (RETIRE, f"        room = len(finished) if self.running else self.max_batch\n{RETIRE}"), (ADMIT, "for _ in range(min(room, len(self.waiting), self.max_batch - len(self.running))):"), says="waits"),
    Mutant("scheduler_step", "Lets who fits overtake who does not.", code=changed(SCHEDULER, (HEAD, FITTING)), says="overtakes"),
    Mutant("scheduler_step", "Serves the smallest first.", code=changed(SCHEDULER, ("        while self.queue", "        self.queue.sort(key=self.sizes.get)\n        while self.queue")), says="overtakes"),
    Mutant("scheduler_step", "Serves the largest first.", code=changed(SCHEDULER, ("        while self.queue", "        self.queue.sort(key=self.sizes.get, reverse=True)\n        while self.queue")), says="overtakes"),
    Mutant("scheduler_step", "Serves the last first.", code=changed(SCHEDULER, ("self.queue.append(name)", "self.queue.insert(0, name)")), says="overtakes"),
    Mutant("scheduler_step", "Serves in the order of the names.", code=changed(SCHEDULER, ("        while self.queue", "        self.queue.sort()\n        while self.queue")), says="overtakes"),
    Mutant("scheduler_step", "Throws out whoever does not fit.", (TOO_LARGE, TOO_LARGE.replace("break", "self.waiting.popleft()\n                continue")), says="overtakes"),
    Mutant("scheduler_step", "Puts whoever does not fit at the end of the queue.", code=changed(SCHEDULER, ("        return self.on", "        if self.queue and len(self.on) < self.max_batch:\n            self.queue.append(self.queue.pop(0))\n        return self.on"))),
    Mutant("scheduler_step", "Pauses a running request so that the next may begin.", code=changed(SCHEDULER, ("        return self.on", "        if self.queue and len(self.on) > 1 and self.sizes[self.queue[0]] <= self.free:\n            self.queue.append(self.on.pop(0))\n            self.on.append(self.queue.pop(0))\n        return self.on"))),
    Mutant("scheduler_step", "Never gives reserved tokens back.", code=changed(SCHEDULER, ("            self.free += self.sizes[name]\n", "")), says="waits"),
    Mutant("scheduler_step", "Forgets one of two that end together.", (RETIRE, "        for name in finished[:1]:\n            del self.running[name]\n"), says="still runs"),
    Mutant("scheduler_step", "Returns the new ones alone.", code=changed(SCHEDULER, ("        while self.queue", "        before = list(self.on)\n        while self.queue"), ("return self.on", "return [name for name in self.on if name not in before]")), says="does not run any more"),
    Mutant("scheduler_step", "Returns how many run.", ("return list(self.running)", "return len(self.running)"), says="names"),
    Mutant("scheduler_step", "Empties the list that it is given.", (RETIRE, "        while finished:\n            del self.running[finished.pop()]\n"), says="changes what it was given"),
    Mutant("scheduler_step", "Keeps one queue for all schedulers.", code=changed(SCHEDULER, ("self.max_batch, self.free, self.queue, self.sizes, self.on = max_batch, max_tokens, [], {}, []", "self.max_batch, self.free, self.sizes, self.on = max_batch, max_tokens, {}, []\n        self.queue = self.__class__.__dict__.get('kept', [])\n        Scheduler.kept = self.queue"))),
    Mutant("scheduler_step", "Stops when a request ends before its limit.", code=changed(SCHEDULER, ("self.sizes[name] = need", "self.sizes[name] = need\n        self.left = getattr(self, 'left', {}) | {name: max_new_tokens}"), ("        for name in finished:\n", "        for name in self.on:\n            self.left[name] -= 1\n        for name in [name for name in self.on if not self.left[name]]:\n")), says="still runs"),
    Mutant("scheduler_step", "Reserves the tokens of the prompt, and a step's new one for each that runs.", code=changed(SCHEDULER, ("need = prompt_tokens + max_new_tokens - 1", "need = prompt_tokens + 1"))),
    Mutant("scheduler_step", "Admits a large request only when nothing runs.", (TOO_LARGE, TOO_LARGE.replace(":\n", " or (self.running and 2 * size > self.max_tokens):\n")), says="waits"),
    Mutant("scheduler_step", "Expects requests to end in the order in which they came.", code=changed(SCHEDULER, ("        for name in finished:\n            self.on.remove(name)\n", "        left = list(finished)\n        for name in list(self.on):\n            if name in left[:1]:\n                self.on.remove(left.pop(0))\n        for name in finished:\n")), says="still runs"),
    Mutant("scheduler_step", "Runs 16 requests at most.", ("< self.max_batch", "< min(self.max_batch, 16)"), says="waits"),
    Mutant("scheduler_step", "Makes no object.", code="def Scheduler(max_batch, max_tokens):\n    return None\n", says="must make an object"),
    # scheduler_refuses
    Mutant("scheduler_refuses", "Never refuses.", (f"        {NEVER}\n{REFUSE}", ""), says="ValueError"),
    Mutant("scheduler_refuses", "Refuses what fits exactly.", (NEVER, "if size >= self.max_tokens:"), says="only what never fits"),
    Mutant("scheduler_refuses", "Refuses one token too late.", (NEVER, "if size > self.max_tokens + 1:"), says="ValueError"),
    Mutant("scheduler_refuses", "Looks at the prompt alone.", (NEVER, "if prompt_tokens > self.max_tokens:"), says="ValueError"),
    Mutant("scheduler_refuses", "Counts the last token too.", (SIZE, "size = prompt_tokens + max_new_tokens"), says="only what never fits"),
    Mutant("scheduler_refuses", "Refuses what does not fit now.", (NEVER, "if size + sum(self.running.values()) + sum(n for _, n in self.waiting) > self.max_tokens:"), says="only what never fits"),
    Mutant("scheduler_refuses", "Drops it in silence.", (REFUSE, "            return\n"), says="ValueError"),
    Mutant("scheduler_refuses", "Returns False.", (REFUSE, "            return False\n"), says="ValueError"),
    Mutant("scheduler_refuses", "Refuses, and keeps it in the queue.", (f"        {NEVER}\n{REFUSE}{QUEUE}", f"{QUEUE}        {NEVER}\n{REFUSE}"), says="never come"),
    Mutant("scheduler_refuses", "Empties the queue when it refuses.", (REFUSE, f"            self.waiting.clear()\n{REFUSE}"), says="never come"),
    Mutant("scheduler_refuses", "Refuses in `step`.", (f"        {NEVER}\n{REFUSE}", ""), (TOO_LARGE, f"if size > self.max_tokens:\n                raise ValueError('too large')\n            {TOO_LARGE}"), says="ValueError"),
    Mutant("scheduler_refuses", "Raises another kind of exception.", ("raise ValueError(", "raise KeyError("), says="KeyError"),
    Mutant("scheduler_refuses", "Stops with an assert.", (f"        {NEVER}\n{REFUSE}", "        assert size <= self.max_tokens\n"), says="AssertionError"),
    Mutant("scheduler_refuses", "Bounds it by the requests.", (NEVER, "if size > self.max_tokens * self.max_batch:"), says="ValueError"),
    Mutant("scheduler_refuses", "Cuts the answer to what fits.", (f"        {NEVER}\n{REFUSE}", "        size = min(size, self.max_tokens)\n"), says="ValueError"),
    Mutant("scheduler_refuses", "Keeps the name of what it refused.", (SIZE, f"{SIZE}\n        self.names = getattr(self, 'names', [])\n        if name in self.names:\n            raise ValueError('known')\n        self.names.append(name)"), says="never come"),
    Mutant("scheduler_refuses", "Takes nothing more after its second refusal.", (NEVER, "self.refused = getattr(self, 'refused', 0) + (size > self.max_tokens)\n        if size > self.max_tokens or self.refused > 1:"), says="only what never fits"),
    # step_seconds
    Mutant("step_seconds", "Forgets keys and values.", (TOTAL, "return products"), says="its own"),
    Mutant("step_seconds", "Hides keys and values behind the products.", ("return products +", "return max(2 * P * sum(new) / peak, P * element_bytes / bandwidth +"), ("a_token / bandwidth\n", "a_token / bandwidth)\n"), says="after the products"),
    Mutant("step_seconds", "Adds compute and weights.", (PRODUCTS, "products = 2 * P * sum(new) / peak + P * element_bytes / bandwidth"), says="not their sum"),
    Mutant("step_seconds", "Reads alone.", (PRODUCTS, "products = P * element_bytes / bandwidth")),
    Mutant("step_seconds", "Computes alone.", (PRODUCTS, "products = 2 * P * sum(new) / peak"), says="weights"),
    Mutant("step_seconds", "Takes a prompt for one token.", ("sum(new) / peak", "len(new) / peak"), says="all its tokens"),
    Mutant("step_seconds", "Reads the weights for each request.", ("P * element_bytes / bandwidth)", "len(new) * P * element_bytes / bandwidth)"), says="once for all"),
    Mutant("step_seconds", "Pads all to the longest.", ("sum(seen)", "len(seen) * max(seen)"), says="longest"),
    Mutant("step_seconds", "Reads the longest alone.", ("sum(seen)", "max(seen)"), says="add them up"),
    Mutant("step_seconds", "Stores query heads.", ("n_kv_heads", "n_heads"), says="query head"),
    Mutant("step_seconds", "Stores keys alone.", ("a_token = 2 * ", "a_token = "), says="2 of them"),
    Mutant("step_seconds", "Counts the new tokens twice.", ("sum(seen)", "(sum(seen) + sum(new))")),
    Mutant("step_seconds", "Lets a prompt have no keys and values to read.", ("sum(seen)", "sum(s for s, n in zip(seen, new) if n == 1)")),
    Mutant("step_seconds", "Knows 16 bits only, in the weights.", ("P * element_bytes", "P * 2")),
    Mutant("step_seconds", "Knows 16 bits only, in keys and values.", ("head_dim * element_bytes", "head_dim * 2")),
    Mutant("step_seconds", "Gives milliseconds.", (TOTAL, f"{TOTAL.replace('return ', 'return 1e3 * (')})"), says="1000 times"),
    Mutant("step_seconds", "Counts the input embedding as work.", ("P = config.matmul_params\n", "P = config.parameter_count\n")),
    Mutant("step_seconds", "Computes faster with smaller weights.", ("sum(new) / peak", "sum(new) / peak * min(1, element_bytes / 2)")),
    # batch_at_ridge
    Mutant("batch_at_ridge", "Forgets keys and values.", ("a_user_reads = context * 2", "a_user_reads = 0 * context * 2"), says="nobody shares"),
    Mutant("batch_at_ridge", "Gives the ridge.", (LEAST, "return ceil(peak / bandwidth)"), says="not for each weight"),
    Mutant("batch_at_ridge", "Goes below 0 where no batch is large enough.", (NEVER_THERE, ""), says="never gets there"),
    Mutant("batch_at_ridge", "Gives a part of a user.", ("return ceil(", "return ("), says="whole"),
    Mutant("batch_at_ridge", "Rounds down.", ("return ceil(", "return int("), says="Round up"),
    Mutant("batch_at_ridge", "Rounds to the nearest.", ("return ceil(", "return round(")),
    Mutant("batch_at_ridge", "Forgets attention's FLOPs.", (FLOPS, "a_user_computes = 2 * P / peak")),
    Mutant("batch_at_ridge", "Stores query heads.", ("n_kv_heads", "n_heads"), says="query head"),
    Mutant("batch_at_ridge", "Stores keys alone.", ("context * 2 * L", "context * L"), says="2 of them"),
    Mutant("batch_at_ridge", "Gives keys and values the bytes of weights.", ("head_dim * element_bytes", "head_dim * weight_bytes")),
    Mutant("batch_at_ridge", "Gives weights the bytes of keys and values.", ("P * weight_bytes", "P * element_bytes"), says="weight_bytes"),
    Mutant("batch_at_ridge", "Counts a multiplication and no addition.", (FLOPS, "a_user_computes = (P + 2 * A * L * context) / peak"), says="2 FLOPs"),
    Mutant("batch_at_ridge", "Gives 0 for never.", ("return None", "return 0")),
    Mutant("batch_at_ridge", "Gives infinity for never.", ("return None", "return float('inf')")),
    Mutant("batch_at_ridge", "Says never where it takes many.", ("return ceil(", "least = ceil("), ("(a_user_computes - a_user_reads))", "(a_user_computes - a_user_reads))\n    return least if least < 1000 else None")),
    Mutant("batch_at_ridge", "Starts at two users.", ("return ceil(", "return max(2, ceil("), ("a_user_reads))", "a_user_reads)))")),
    Mutant("batch_at_ridge", "Forgets that the context grows attention's FLOPs.", ("4 * A * L * context", "4 * A * L")),
    Mutant("batch_at_ridge", "Counts the input embedding as work.", ("P, A, L = config.matmul_params", "P, A, L = config.parameter_count")),
    Mutant("batch_at_ridge", "Wants computing to take longer, not as long.", ("return ceil(", "return 1 + int(")),
    Mutant("batch_at_ridge", "Divides by 0 where a user's computing takes as long as its reading.", ("a_user_computes <= a_user_reads", "a_user_computes < a_user_reads"), says="ZeroDivisionError"),
    # users_that_fit
    Mutant("users_that_fit", "Forgets the weights.", ("(memory - config.parameter_count * weight_bytes)", "memory"), says="weights"),
    Mutant("users_that_fit", "Keeps the last token too.", (SIZES, "sizes = [prompt + answer for prompt, answer in requests]"), says="never fed back"),
    Mutant("users_that_fit", "Leaves no room for the answers.", (SIZES, "sizes = [prompt for prompt, answer in requests]"), says="answer"),
    Mutant("users_that_fit", "Makes slots of the longest prompt and the longest answer.", ("max(sizes))", "(max(p for p, _ in requests) + max(a for _, a in requests) - 1))"), says="together"),
    Mutant("users_that_fit", "Makes slots of the mean request.", ("max(sizes))", "-(-sum(sizes) // len(sizes)))"), says="largest"),
    Mutant("users_that_fit", "Makes slots of the first request.", ("max(sizes))", "sizes[0])")),
    Mutant("users_that_fit", "Lets small ones overtake.", (WALK, "        if size <= room:\n            room -= size\n            users += 1\n"), says="overtakes"),
    Mutant("users_that_fit", "Sorts them by size.", ("for size in sizes:", "for size in sorted(sizes):")),
    Mutant("users_that_fit", "Counts the one that does not fit any more.", (WALK, "        users += 1\n        room -= size\n        if room < 0:\n            break\n")),
    Mutant("users_that_fit", "Wants room to be left.", ("if room < 0:", "if room <= 0:")),
    Mutant("users_that_fit", "Counts slots that nobody uses.", (SLOTS, "slots = max(0, room) // max(sizes)"), says="not more users"),
    Mutant("users_that_fit", "Goes below 0.", (SLOTS, "slots = min(len(sizes), room // max(sizes))")),
    Mutant("users_that_fit", "Has at least one slot.", ("max(0, room) // max(sizes)", "max(1, room // max(sizes))")),
    Mutant("users_that_fit", "Stores query heads.", ("n_kv_heads", "n_heads"), says="query head"),
    Mutant("users_that_fit", "Stores keys alone.", ("a_token = 2 * ", "a_token = "), says="2 of them"),
    Mutant("users_that_fit", "Exchanges the two.", ("return slots, users", "return users, slots")),
    Mutant("users_that_fit", "Gives one number.", ("return slots, users", "return slots"), says="two numbers"),
    Mutant("users_that_fit", "Gives a part of a slot.", ("max(0, room) // max(sizes)", "max(0, room) / max(sizes)")),
    Mutant("users_that_fit", "Leaves the input embedding out.", ("- config.parameter_count", "- config.streamed_params")),
    Mutant("users_that_fit", "Stores keys and values in the precision of the weights.", ("head_dim * element_bytes", "head_dim * weight_bytes")),
    Mutant("users_that_fit", "Stores weights in the precision of keys and values.", ("- config.parameter_count * weight_bytes", "- config.parameter_count * element_bytes")),
    Mutant("users_that_fit", "Takes half a byte for one.", ("head_dim * element_bytes", "head_dim * max(1, int(element_bytes))")),
    Mutant("users_that_fit", "Counts 1,024 users at most.", ("users += 1", "users = min(1024, users + 1)")),
    # batch_guesses
    Mutant("batch_guesses", "Takes the number of users on both.", ("9.5, 20.0", "16.0, 64.0"), says="On the CPU"),
    Mutant("batch_guesses", "Forgets the keys and values on the H100.", ("9.5, 20.0", "9.5, 64.0"), says="keys and values"),
    Mutant("batch_guesses", "Forgets that a CPU's arithmetic runs out.", ("9.5, 20.0", "15.6, 20.0"), says="On the CPU"),
    Mutant("batch_guesses", "Thinks that a batch takes as much longer as it is large.", ("9.5, 20.0", "1.0, 1.0"), says="once for all"),
    Mutant("batch_guesses", "Gives one number.", ("9.5, 20.0", "9.5"), says="two numbers"),
    Mutant("batch_guesses", "Exchanges the machines.", ("9.5, 20.0", "20.0, 9.5"), says="On the CPU"),
    Mutant("batch_guesses", "Gives a number of 400 digits.", ("9.5, 20.0", "10**400, 20.0"), says="On the CPU"),
    Mutant("batch_guesses", "Gives a number below all measure.", ("9.5, 20.0", "9.5, -(10**400)"), says="On the H100"),
]  # fmt: skip
