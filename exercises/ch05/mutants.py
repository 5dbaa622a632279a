"""Wrong answers to the exercises of chapter 5, each of which its grader must refuse."""

from minillm.grading.mutants import Mutant

A_LARGEST = "largest = w.abs().amax(dim=1, keepdim=True)  # (N, 1)"
A_SCALES = "scales = torch.where(largest > 0, largest / 127, 1.0)"
A_CODES = "(w / scales).round().to(torch.int8)"
Z_RAISE = 'raise ValueError(f"groups of {group_size} do not divide {w.shape[1]} columns")'
Z_LOW_HIGH = "low, high = groups.amin(dim=2, keepdim=True), groups.amax(dim=2, keepdim=True)"
Z_SCALES = "scales = torch.where(high > low, (high - low) / 15, 1.0)"
Z_CODES = "codes = ((groups - zeros) / scales + 8).round().clamp(0, 15)"
Z_ZEROS = "zeros = torch.where(high > low, low + 8 * scales, low)"
PACK = "return codes[:, ::2] << 4 | codes[:, 1::2]"
UNPACK = "torch.stack([packed >> 4, packed & 15], dim=2).flatten(1)"
G_GROUPS = "groups = codes.unflatten(1, (scales.shape[1], -1)).float() - 8"
G_WEIGHT = "w = (groups * scales[:, :, None] + zeros[:, :, None]).flatten(1)"
G_PRODUCT = "return x @ w.to(x.dtype).T"
E_SUM = "groups = x.abs().unflatten(1, (scales.shape[1], -1)).sum(dim=2)"
E_BOUND = "return groups @ scales.T / 2"
KV_LARGEST = 'largest = x.abs().amax(dim=3 if axis == "token" else 2, keepdim=True)'
KV_CODES = "(x / scales).round().to(torch.int8)"
BITS = "return bits + (scale_bits + zero_bits) / group_size"
KV_NUMBERS = "kv_numbers = 2 * config.n_layers * config.n_kv_heads * config.head_dim * context * batch"
STEP = "return (config.matmul_params * weight_bits + kv_numbers * kv_bits) / 8"
ATTENTION = "attention = 4 * config.n_layers * config.n_kv_heads * config.head_dim * context * batch / bandwidth"
BEFORE = "before = max(computing, P * 16 / 8 / bandwidth) + attention"
GAIN = "return before / (max(computing, P * weight_bits / 8 / bandwidth) + attention)"
ENDS = "return floor(ridge * weight_bits / 16), ceil(ridge)"

MUTANTS = [
    # absmax_quantize
    Mutant("absmax_quantize", "Cuts off in place of rounding.", (".round()", ""), says="cuts off"),
    Mutant("absmax_quantize", "Rounds down.", (".round()", ".floor()"), says="cuts off"),
    Mutant("absmax_quantize", "Takes one scale for the whole weight.", (A_LARGEST, "largest = w.abs().amax().expand(len(w), 1)"), says="one for all"),
    Mutant("absmax_quantize", "Takes a scale for each column.", ("amax(dim=1, keepdim=True)", "amax(dim=0, keepdim=True)"), says="shape"),
    Mutant("absmax_quantize", "Forgets the dimension of the scales.", ("scales\n", "scales.squeeze(1)\n"), says="shape"),
    Mutant("absmax_quantize", "Divides by 128, and brings 128 back to 127.", ("largest / 127", "largest / 128"), (".round()", ".round().clamp(-127, 127)"), says="law"),
    Mutant("absmax_quantize", "Divides by 128, so that 128 wraps around.", ("largest / 127", "largest / 128")),
    Mutant("absmax_quantize", "Lets codes go down to -128.", ("largest / 127", "largest / 127.6"), (".round()", ".round().clamp(-128, 127)")),
    Mutant("absmax_quantize", "Takes the scale from the spread, as if there were a zero.", ("largest / 127", "(w.amax(1, keepdim=True) - w.amin(1, keepdim=True)) / 255 + (largest == w.abs().amin(1, keepdim=True))"), (".round()", ".round().clamp(-127, 127)")),
    Mutant("absmax_quantize", "Looks at positive weights only.", ("w.abs().amax", "w.amax")),
    Mutant("absmax_quantize", "Divides zeros by 0.", (A_SCALES, "scales = largest / 127"), says="above 0"),
    Mutant("absmax_quantize", "Adds 1e-8 to every scale.", (A_SCALES, "scales = largest / 127 + 1e-8"), says="as large as they need be"),
    Mutant("absmax_quantize", "Makes no scale smaller than 1e-5.", (A_SCALES, "scales = (largest / 127).clamp_min(1e-5)"), says="as large as they need be"),
    Mutant("absmax_quantize", "Computes in the dtype of w.", ("    w = w.float()\n", ""), (A_SCALES, "scales = torch.where(largest > 0, largest / 127, 1.0).to(w.dtype)"), (".round()", ".round().clamp(-127, 127)"), ("scales\n", "scales.float()\n"), says="neighbouring"),
    Mutant("absmax_quantize", "Rounds scales to 16 bits after the codes.", ("scales\n", "scales.bfloat16().float()\n"), says="changed after"),
    Mutant("absmax_quantize", "Uses 7 bits.", ("largest / 127", "largest / 63"), says="as large as they need be"),
    Mutant("absmax_quantize", "Returns w over s, not yet in int8.", (".to(torch.int8)", ""), says="float32"),
    Mutant("absmax_quantize", "Returns unsigned codes.", (".to(torch.int8)", ".to(torch.int8).view(torch.uint8)"), says="uint8"),
    Mutant("absmax_quantize", "Returns 1 / s.", ("scales\n", "1 / scales\n")),
    Mutant("absmax_quantize", "Clips outliers at three standard deviations.", (A_LARGEST, "largest = torch.minimum(w.abs().amax(dim=1, keepdim=True), 3 * w.square().mean(1, keepdim=True).sqrt())"), (".round()", ".round().clamp(-127, 127)"), says="law"),
    Mutant("absmax_quantize", "Fails for a row of zeros.", ("torch.where(largest > 0, largest / 127, 1.0)", "largest / 127 / (largest > 0)"), says="NaN"),
    Mutant("absmax_quantize", "Looks at the first 4,096 weights of a row.", (A_LARGEST, "largest = w[:, :4096].abs().amax(dim=1, keepdim=True)"), (".round()", ".round().clamp(-127, 127)"), says="law"),
    # zeropoint_quantize
    Mutant("zeropoint_quantize", "Gives the value of code 0 as the zero.", ("scales.squeeze(2), zeros.squeeze(2)", "scales.squeeze(2), low.squeeze(2)"), says="not of code 0"),
    Mutant("zeropoint_quantize", "Gives the code of 0 as the zero.", ("zeros.squeeze(2)", "(8 - zeros / scales).squeeze(2)")),
    Mutant("zeropoint_quantize", "Gives the zero a wrong sign.", ("zeros.squeeze(2)", "-zeros.squeeze(2)"), says="sign of z"),
    Mutant("zeropoint_quantize", "Gives the middle of the group as the zero.", ("zeros.squeeze(2)", "((low + high) / 2).squeeze(2)"), says="7.5"),
    Mutant("zeropoint_quantize", "Counts 16 steps between 16 codes.", ("(high - low) / 15", "(high - low) / 16"), says="law"),
    Mutant("zeropoint_quantize", "Counts 14 steps.", ("(high - low) / 15", "(high - low) / 14"), says="15 steps"),
    Mutant("zeropoint_quantize", "Is symmetric around 0.", (Z_LOW_HIGH, "high = groups.abs().amax(dim=2, keepdim=True)\n    low = -high"), says="symmetric"),
    Mutant("zeropoint_quantize", "Shares a scale in the whole row.", (Z_LOW_HIGH, "low, high = (x.expand(-1, groups.shape[1], 1) for x in (groups.amin((1, 2), keepdim=True), groups.amax((1, 2), keepdim=True)))"), says="whole row"),
    Mutant("zeropoint_quantize", "Groups every K/g-th column.", ("unflatten(1, (-1, group_size))", "unflatten(1, (group_size, -1)).transpose(1, 2)"), ("flatten(1), scales", "transpose(1, 2).flatten(1), scales")),
    Mutant("zeropoint_quantize", "Groups rows in place of columns.", ("groups = w.float().unflatten(1, (-1, group_size))", "groups = w.float().reshape(-1, len(w), group_size).transpose(0, 1)"), ("codes.to(torch.uint8).flatten(1)", "codes.to(torch.uint8).transpose(0, 1).reshape(w.shape)")),
    Mutant("zeropoint_quantize", "Cuts off in place of rounding.", (Z_CODES, "codes = ((groups - low) / scales).clamp(0, 15)"), says="cuts off"),
    Mutant("zeropoint_quantize", "Stretches every group to 0.", (Z_LOW_HIGH, "low, high = groups.amin(dim=2, keepdim=True).clamp_max(0), groups.amax(dim=2, keepdim=True).clamp_min(0)"), says="as large as they need be"),
    Mutant("zeropoint_quantize", "Divides equal weights by 0.", (Z_SCALES, "scales = (high - low) / 15"), says="above 0"),
    Mutant("zeropoint_quantize", "Loses equal weights.", (Z_ZEROS, "zeros = low + 8 * scales"), (Z_SCALES, "scales = ((high - low) / 15).clamp_min(1e-5)")),
    Mutant("zeropoint_quantize", "Forgets where equal weights lie.", ("low + 8 * scales, low)", "low + 8 * scales, 0.0)"), says="equal weights"),
    Mutant("zeropoint_quantize", "Loses small equal weights in 8 steps of 1.", (Z_ZEROS, "zeros = low + 8 * scales"), says="equal weights"),
    Mutant("zeropoint_quantize", "Puts the smallest weight on code 8.", (Z_ZEROS, "zeros = low"), says="law"),
    Mutant("zeropoint_quantize", "Rounds the zero to whole steps after the codes, as for an integer zero point.", ("zeros.squeeze(2)", "torch.where(high > low, (zeros / scales).round() * scales, zeros).squeeze(2)"), says="law"),
    Mutant("zeropoint_quantize", "Stores zeros in 16 bits after the codes.", ("zeros.squeeze(2)", "zeros.squeeze(2).bfloat16().float()"), says="changed after"),
    Mutant("zeropoint_quantize", "Computes in the dtype of w.", ("w.float()", "w"), ("scales.squeeze(2), zeros.squeeze(2)", "scales.squeeze(2).float(), zeros.squeeze(2).float()")),
    Mutant("zeropoint_quantize", "Gives code 0 to the largest weight.", ("(groups - zeros) / scales + 8", "(high - groups) / scales"), says="code 15"),
    Mutant("zeropoint_quantize", "Takes any group size.", (Z_RAISE, "w = w[:, : w.shape[1] // group_size * group_size]\n    if group_size > w.shape[1]:\n        group_size = 1"), says="ValueError"),
    Mutant("zeropoint_quantize", "Leaves it to PyTorch to fail.", ("if w.shape[1] % group_size:", "if False:"), says="RuntimeError"),
    Mutant("zeropoint_quantize", "Pads the last group.", (Z_RAISE, "w = torch.nn.functional.pad(w, (0, -w.shape[1] % group_size))"), says="ValueError"),
    Mutant("zeropoint_quantize", "Refuses a group that is longer than the row alone.", ("% group_size:", "< group_size:"), says="RuntimeError"),
    Mutant("zeropoint_quantize", "Leaves a dimension of 1.", ("scales.squeeze(2), zeros.squeeze(2)", "scales, zeros"), says="shape"),
    Mutant("zeropoint_quantize", "Returns signed codes.", (".to(torch.uint8)", ".to(torch.int8)"), says="int8"),
    Mutant("zeropoint_quantize", "Returns zeros before scales.", ("scales.squeeze(2), zeros.squeeze(2)", "zeros.squeeze(2), scales.squeeze(2)")),
    Mutant("zeropoint_quantize", "Makes no scale smaller than 1e-10.", (Z_SCALES, "scales = torch.where(high > low, ((high - low) / 15).clamp_min(1e-10), 1.0)"), says="as large as they need be"),
    Mutant("zeropoint_quantize", "Adds 1e-12 to every scale.", (Z_SCALES, "scales = torch.where(high > low, (high - low) / 15 + 1e-12, 1.0)"), says="as large as they need be"),
    Mutant("zeropoint_quantize", "Refuses groups of an odd size.", ("% group_size:", "% group_size or group_size % 2:"), says="ValueError"),
    Mutant("zeropoint_quantize", "Refuses groups of more than 128.", ("% group_size:", "% group_size or group_size > 128:"), says="ValueError"),
    Mutant("zeropoint_quantize", "Takes the weight itself for the scale of a group of one.", (Z_RAISE, Z_RAISE + "\n    if group_size == 1:\n        return torch.full_like(w, 8).to(torch.uint8), w.float(), w.float()"), says="above 0"),
    # pack_nibbles
    Mutant("pack_nibbles", "Puts the even column into the lower half.", (PACK, "return codes[:, 1::2] << 4 | codes[:, ::2]"), says="upper half"),
    Mutant("pack_nibbles", "Pairs a column with the one half a row on.", (PACK, "half = codes.shape[1] // 2\n    return codes[:, :half] << 4 | codes[:, half:]"), says="Neighbours"),
    Mutant("pack_nibbles", "Forgets to move the even column.", (PACK, "return codes[:, ::2] | codes[:, 1::2]"), says="overlap"),
    Mutant("pack_nibbles", "Moves by 2 bits.", ("<< 4", "<< 2"), says="4 bits"),
    Mutant("pack_nibbles", "Masks the wrong way.", (PACK, "return codes[:, ::2] << 4 & codes[:, 1::2]")),
    Mutant("pack_nibbles", "Makes a byte of 4.", (PACK, "return codes[:, ::2].int() << 4 | codes[:, 1::2]"), says="uint8"),
    Mutant("pack_nibbles", "Keeps the even column alone.", (" | codes[:, 1::2]", ""), says="one of the two"),
    Mutant("pack_nibbles", "Multiplies by 15.", (PACK, "return codes[:, ::2] * 15 + codes[:, 1::2]")),
    Mutant("pack_nibbles", "Makes the codes signed on the way.", (PACK, "codes = codes ^ 8\n    return codes[:, ::2] << 4 | codes[:, 1::2]")),
    Mutant("pack_nibbles", "Packs neighbours of a column.", (PACK, "flat = codes.T.flatten().reshape(-1, 2)\n    return (flat[:, 0] << 4 | flat[:, 1]).reshape(len(codes), -1)")),
    # unpack_nibbles
    Mutant("unpack_nibbles", "Gives the lower half first.", ("[packed >> 4, packed & 15]", "[packed & 15, packed >> 4]"), says="comes first"),
    Mutant("unpack_nibbles", "Gives all upper halves, then all lower ones.", (UNPACK, "torch.cat([packed >> 4, packed & 15], dim=1)"), says="interleave"),
    Mutant("unpack_nibbles", "Forgets the mask.", ("packed & 15", "packed"), says="mask"),
    Mutant("unpack_nibbles", "Does not move the upper half.", ("packed >> 4", "packed & 240"), says="move down"),
    Mutant("unpack_nibbles", "Shifts a signed byte.", ("packed >> 4", "(packed.view(torch.int8) >> 4)"), ("packed & 15", "(packed & 15).view(torch.int8)"), says="is int8"),
    Mutant("unpack_nibbles", "Shifts a signed byte, and is unsigned again too late.", ("packed >> 4", "(packed.view(torch.int8) >> 4).view(torch.uint8)")),
    Mutant("unpack_nibbles", "Takes codes for signed.", ("return torch.stack", "return (lambda c: torch.where(c > 7, c - 16, c))(torch.stack"), (".flatten(1)  #", ".flatten(1).char())  #"), says="int8"),
    Mutant("unpack_nibbles", "Masks with 7.", ("& 15", "& 7")),
    Mutant("unpack_nibbles", "Stacks the halves as rows.", ("dim=2).flatten(1)", "dim=1).flatten(1)"), says="interleave"),
    Mutant("unpack_nibbles", "Leaves the pairs in a dimension of their own.", (".flatten(1)", ""), says="shape"),
    # groupwise_matmul
    Mutant("groupwise_matmul", "Subtracts 8 in uint8.", (G_GROUPS, "groups = (codes.unflatten(1, (scales.shape[1], -1)) - 8).float()"), says="uint8"),
    Mutant("groupwise_matmul", "Forgets the 8.", (".float() - 8", ".float()"), says="subtract 8"),
    Mutant("groupwise_matmul", "Forgets the zeros.", (" + zeros[:, :, None]", ""), says="left out"),
    Mutant("groupwise_matmul", "Subtracts the zeros.", (" + zeros[", " - zeros["), says="added"),
    Mutant("groupwise_matmul", "Takes the zero for a code.", ("groups * scales[:, :, None] + zeros[:, :, None]", "(groups + zeros[:, :, None]) * scales[:, :, None]"), says="not a code"),
    Mutant("groupwise_matmul", "Repeats the scales in the wrong order.", (G_WEIGHT, "g = codes.shape[1] // scales.shape[1]\n    w = groups.flatten(1) * scales.repeat(1, g) + zeros.repeat(1, g)"), says="repeat_interleave"),
    Mutant("groupwise_matmul", "Takes the first group's scale and zero for all.", ("scales[:, :, None] + zeros[:, :, None]", "scales[:, :1, None] + zeros[:, :1, None]"), says="its own scale"),
    Mutant("groupwise_matmul", "Adds the zero once a group, not once an input.", (G_WEIGHT, "w = (groups * scales[:, :, None]).flatten(1)"), (G_PRODUCT, "return x @ w.to(x.dtype).T + zeros.sum(1)")),
    Mutant("groupwise_matmul", "Takes groups of 8 always.", ("(scales.shape[1], -1)", "(-1, 8)")),
    Mutant("groupwise_matmul", "Forgets to transpose.", ("w.to(x.dtype).T", "w.to(x.dtype).reshape(x.shape[1], -1)")),
    Mutant("groupwise_matmul", "Answers in float32 always.", (G_PRODUCT, "return x.float() @ w.T"), says="bfloat16"),
    Mutant("groupwise_matmul", "Multiplies in bfloat16 always.", (G_PRODUCT, "return (x.bfloat16() @ w.bfloat16().T).to(x.dtype)")),
    Mutant("groupwise_matmul", "Knows float32 and bfloat16 only.", (G_PRODUCT, "out = x.float() @ w.T\n    return out.bfloat16() if x.dtype == torch.bfloat16 else out"), says="float64"),
    # error_bound
    Mutant("error_bound", "Lets errors cancel.", ("x.abs().unflatten", "x.unflatten"), says="|x|"),
    Mutant("error_bound", "Takes |x| after the sum.", ("x.abs().unflatten(1, (scales.shape[1], -1)).sum(dim=2)", "x.unflatten(1, (scales.shape[1], -1)).sum(dim=2).abs()")),
    Mutant("error_bound", "Takes |.| of the result.", ("x.abs().unflatten", "x.unflatten"), (E_BOUND, "return (groups @ scales.T / 2).abs()"), says="before the sum"),
    Mutant("error_bound", "Allows a whole step.", (" / 2", ""), says="half a step"),
    Mutant("error_bound", "Gives the typical error.", (E_SUM, "groups = x.square().unflatten(1, (scales.shape[1], -1)).sum(dim=2)"), (E_BOUND, "return (groups @ scales.square().T / 12).sqrt()"), says="typical"),
    Mutant("error_bound", "Adds squares.", (E_SUM, "groups = x.square().unflatten(1, (scales.shape[1], -1)).sum(dim=2)"), (E_BOUND, "return (groups @ scales.square().T).sqrt() / 2"), says="squares"),
    Mutant("error_bound", "Takes the largest input for all.", (E_SUM, "groups = (0 * x + x.abs().amax(1, keepdim=True)).unflatten(1, (scales.shape[1], -1)).sum(dim=2)"), says="own size"),
    Mutant("error_bound", "Takes the largest scale for all.", (E_BOUND, "return groups.sum(1, keepdim=True) * scales.amax(1) / 2"), says="own scale"),
    Mutant("error_bound", "Takes the mean scale.", (E_BOUND, "return groups.sum(1, keepdim=True) * scales.mean(1) / 2"), says="own scale"),
    Mutant("error_bound", "Takes the mean over the inputs.", (E_BOUND, "return groups @ scales.T / 2 / x.shape[1]"), says="not a mean"),
    Mutant("error_bound", "Groups every K/g-th input.", (E_SUM, "groups = x.abs().unflatten(1, (-1, scales.shape[1])).sum(dim=1)")),
    Mutant("error_bound", "Gives outputs in rows.", ("groups @ scales.T", "scales @ groups.T"), says="shape"),
    # quantize_kv
    Mutant("quantize_kv", "Takes the token's axis for the channel's.", ('== "token"', '!= "token"'), says="shape"),
    Mutant("quantize_kv", "Shares a scale among heads.", (KV_LARGEST, KV_LARGEST + "\n    largest = largest.amax(1, keepdim=True).expand_as(largest)"), says="as large as they need be"),
    Mutant("quantize_kv", "Shares a scale among sequences.", (KV_LARGEST, KV_LARGEST + "\n    largest = largest.amax(0, keepdim=True).expand_as(largest)"), says="as large as they need be"),
    Mutant("quantize_kv", "Takes one scale for all.", (KV_LARGEST, KV_LARGEST + "\n    largest = largest.amax().expand_as(largest)"), says="one for all"),
    Mutant("quantize_kv", "Shares a scale among the tokens of a pass.", (KV_LARGEST, KV_LARGEST + "\n    largest = largest.amax(2, keepdim=True).expand_as(largest)"), says="as large as they need be"),
    Mutant("quantize_kv", "Forgets the dimension of the scales.", ("scales\n", 'scales.squeeze(3 if axis == "token" else 2)\n'), says="shape"),
    Mutant("quantize_kv", "Knows tokens only.", ('dim=3 if axis == "token" else 2', "dim=3"), says="shape"),
    Mutant("quantize_kv", "Takes a scale by token for a channel's.", ('dim=3 if axis == "token" else 2, keepdim=True)', 'dim=3, keepdim=True)\n    largest = largest if axis == "token" else largest.amax(2, keepdim=True).expand(-1, -1, -1, x.shape[3])')),
    Mutant("quantize_kv", "Divides zeros by 0.", (A_SCALES, "scales = largest / 127"), says="above 0"),
    Mutant("quantize_kv", "Makes no scale smaller than 1e-5.", (A_SCALES, "scales = (largest / 127).clamp_min(1e-5)"), says="as large as they need be"),
    Mutant("quantize_kv", "Cuts off in place of rounding.", (".round()", ""), says="cuts off"),
    Mutant("quantize_kv", "Computes in bfloat16.", ("x = x.float()", "x = x.bfloat16()"), ("scales\n", "scales.float()\n")),
    Mutant("quantize_kv", "Keeps keys of bfloat16 in it.", ("    x = x.float()\n", ""), (A_SCALES, "scales = torch.where(largest > 0, largest / 127, 1.0).to(x.dtype)"), (".round()", ".round().clamp(-127, 127)"), ("scales\n", "scales.float()\n"), says="neighbouring"),
    Mutant("quantize_kv", "Uses 4 bits.", ("largest / 127", "largest / 7"), says="as large as they need be"),
    Mutant("quantize_kv", "Makes no channel's scale smaller than 1e-8.", (A_SCALES, 'scales = torch.where(largest > 0, largest / 127, 1.0).clamp_min(0.0 if axis == "token" else 1e-8)'), says="as large as they need be"),
    # bits_per_weight
    Mutant("bits_per_weight", "Forgets the zeros.", ("(scale_bits + zero_bits)", "scale_bits"), says="zeros"),
    Mutant("bits_per_weight", "Forgets the scales.", ("(scale_bits + zero_bits)", "zero_bits"), says="scales"),
    Mutant("bits_per_weight", "Counts codes alone.", (BITS, "return bits"), says="Scales and zeros"),
    Mutant("bits_per_weight", "Gives each weight a scale and a zero.", (" / group_size", ""), says="shared"),
    Mutant("bits_per_weight", "Gives the bits of a group.", (BITS, "return bits * group_size + scale_bits + zero_bits"), says="group's"),
    Mutant("bits_per_weight", "Gives bytes.", (BITS, "return (bits + (scale_bits + zero_bits) / group_size) / 8"), says="bytes"),
    Mutant("bits_per_weight", "Knows 16 bits only.", ("(scale_bits + zero_bits)", "32"), says="16 bits only"),
    Mutant("bits_per_weight", "Gives whole bits.", (BITS, "return int(bits + (scale_bits + zero_bits) / group_size)")),
    Mutant("bits_per_weight", "Takes 16 for the smallest group.", ("/ group_size", "/ max(group_size, 16)")),
    # step_bytes
    Mutant("step_bytes", "Counts bits.", (" / 8", ""), says="8"),
    Mutant("step_bytes", "Reads the weights for each user.", ("config.matmul_params * weight_bits", "config.matmul_params * batch * weight_bits"), says="once for all"),
    Mutant("step_bytes", "Shares keys and values among users.", (" * batch", ""), says="Each user"),
    Mutant("step_bytes", "Quantizes keys and values like weights.", ("kv_numbers * kv_bits", "kv_numbers * weight_bits"), says="kv_bits"),
    Mutant("step_bytes", "Reads keys and values in 16 bits.", ("kv_numbers * kv_bits", "kv_numbers * 16"), says="not 16"),
    Mutant("step_bytes", "Reads weights in 16 bits.", ("matmul_params * weight_bits", "matmul_params * 16"), says="not 16"),
    Mutant("step_bytes", "Reads the input embedding.", ("config.matmul_params * weight_bits", "config.parameter_count * weight_bits")),
    Mutant("step_bytes", "Reads keys alone.", ("= 2 * config", "= config"), says="twice"),
    Mutant("step_bytes", "Reads every query head's.", ("n_kv_heads", "n_heads"), says="query heads"),
    Mutant("step_bytes", "Reads one layer's.", ("* config.n_layers ", ""), says="layer"),
    Mutant("step_bytes", "Rounds bits to whole bytes.", (STEP, "return config.matmul_params * -(-weight_bits // 8) + kv_numbers * -(-kv_bits // 8)")),
    # weight_only_gain
    Mutant("weight_only_gain", "Compares the bytes of weights.", (GAIN, "return 16 / weight_bits"), says="a step is more"),
    Mutant("weight_only_gain", "Forgets keys and values.", (ATTENTION, "attention = 0"), says="stay as long"),
    Mutant("weight_only_gain", "Takes a step to be bound by memory always.", ("computing = 2 * P * batch / peak", "computing = 0"), says="binds"),
    Mutant("weight_only_gain", "Quantizes keys and values, too.", (" + attention)", " + attention * weight_bits / 16)"), says="keep 16"),
    Mutant("weight_only_gain", "Raises the peak, too.", ("(max(computing, P * weight", "(max(computing * weight_bits / 16, P * weight"), says="raise the peak"),
    Mutant("weight_only_gain", "Adds computing to reading.", (BEFORE, "before = computing + P * 16 / 8 / bandwidth + attention"), (GAIN, "return before / (computing + P * weight_bits / 8 / bandwidth + attention)"), says="not both"),
    Mutant("weight_only_gain", "Hides attention behind computing.", (BEFORE, "before = max(computing, P * 16 / 8 / bandwidth + attention)"), (GAIN, "return before / max(computing, P * weight_bits / 8 / bandwidth + attention)"), says="comes after"),
    Mutant("weight_only_gain", "Has it upside down.", (GAIN, "return (max(computing, P * weight_bits / 8 / bandwidth) + attention) / before"), says="upside down"),
    Mutant("weight_only_gain", "Reads the weights for each user.", (BEFORE, "P_read = P * batch\n    before = max(computing, P_read * 16 / 8 / bandwidth) + attention"), (GAIN, "return before / (max(computing, P_read * weight_bits / 8 / bandwidth) + attention)"), says="once for all"),
    Mutant("weight_only_gain", "Computes for one user.", ("2 * P * batch", "2 * P"), says="binds"),
    Mutant("weight_only_gain", "Shares keys and values among users.", ("context * batch", "context"), says="Each user"),
    Mutant("weight_only_gain", "Counts a multiplication and an addition as one.", ("2 * P * batch", "P * batch"), says="addition"),
    Mutant("weight_only_gain", "Stores every query head.", ("n_kv_heads", "n_heads"), says="query heads"),
    Mutant("weight_only_gain", "Reads the input embedding.", ("    computing =", "    P = config.parameter_count\n    computing ="), says="embedding"),
    Mutant("weight_only_gain", "Has a computing bound before it quantizes, and none after.", ("(max(computing, P * weight_bits / 8 / bandwidth)", "(P * weight_bits / 8 / bandwidth")),
    Mutant("weight_only_gain", "Lets attention compute for longer than it reads.", (ATTENTION, f"{ATTENTION}\n    attention = max(attention, 4 * config.n_layers * config.n_heads * config.head_dim * context * batch / peak)"), says="FLOPs are left out"),
    Mutant("weight_only_gain", "Takes the width of the model over its heads for the size of a head.", ("config.head_dim", "config.d_model // config.n_heads"), says="head_dim"),
    # gain_ends
    Mutant("gain_ends", "Rounds the first up.", ("floor(ridge", "ceil(ridge"), says="first down"),
    Mutant("gain_ends", "Rounds the second down.", ("ceil(ridge)", "floor(ridge)"), says="second up"),
    Mutant("gain_ends", "Does not round.", (ENDS, "return ridge * weight_bits / 16, ridge"), says="whole"),
    Mutant("gain_ends", "Has them in the wrong order.", (ENDS, "return ceil(ridge), floor(ridge * weight_bits / 16)"), says="comes first"),
    Mutant("gain_ends", "Takes the ridge to be in FLOPs per weight.", ("ceil(ridge)", "ceil(2 * ridge)"), says="2 FLOPs"),
    Mutant("gain_ends", "Lets fewer bits help for longer.", ("ridge * weight_bits / 16", "ridge * 16 / weight_bits"), says="smaller batch"),
    Mutant("gain_ends", "Forgets the factor of 2.", ("weight_bits / 16", "weight_bits / 32"), says="weight_bits / 8"),
    Mutant("gain_ends", "Finds the first user beyond, not the last with the whole gain.", (ENDS, "return floor(ridge * weight_bits / 16) + 1, floor(ridge) + 1")),
    Mutant("gain_ends", "Has at least one user.", ("floor(ridge * weight_bits / 16)", "max(1, floor(ridge * weight_bits / 16))")),
    # quantized_guesses
    Mutant("quantized_guesses", "Takes 4 bits to be all that int4 has.", ("480.0", "617.0"), says="scale and a zero"),
    Mutant("quantized_guesses", "Takes the gain of one user for that of 64.", ("1.22", "3.14"), says="keys and values"),
    Mutant("quantized_guesses", "Expects no gain for many users.", ("1.22", "1.0"), says="quarter"),
    Mutant("quantized_guesses", "Gives what was measured, not the bound.", ("303.0, 480.0", "155.6, 196.8"), says="one byte"),
    Mutant("quantized_guesses", "Gives tokens/s of bfloat16 for int8.", ("303.0", "154.0"), says="one byte"),
    Mutant("quantized_guesses", "Gives milliseconds.", ("303.0, 480.0", "3.3, 2.08"), says="In int8"),
    Mutant("quantized_guesses", "Counts a tenth of the bandwidth too much.", ("303.0, 480.0", "333.0, 528.0"), says="6.61 GB"),
    Mutant("quantized_guesses", "Gives two numbers.", ("303.0, 480.0, ", "303.0, "), says="three numbers"),
    Mutant("quantized_guesses", "Gives a number beyond all measure.", ("480.0", "10**400"), says="In int4"),
    Mutant("quantized_guesses", "Gives a number below all measure.", ("303.0", "-(10**400)"), says="In int8"),
]  # fmt: skip
