#!/usr/bin/env python3
"""Compares our token ids with llama.cpp's for many seeded strings: scripts, code, white space, emoji, digits, specials.

The reference ids come from llama-cpp-python (`pip install llama-cpp-python==0.3.36`, compiles llama.cpp), or from a
file that an earlier run wrote with --save, which needs no package at all. Every string is tokenized twice: special
tokens in the text as plain text, and recognised. No BOS or EOS is added.

Usage:
    python tools/check_tokenizer.py --model FILE.gguf --cli target/release/powerinfer
    python tools/check_tokenizer.py --model FILE.gguf --save ids.json                     # reference only
    python tools/check_tokenizer.py --model FILE.gguf --reference ids.json --cli target/release/powerinfer

Our CLI is called as
    powerinfer tokenize -m FILE --file IN.json --json --no-bos [--parse-special]
where IN.json is an array of strings, and prints an array of id arrays. Exit status: 0 all equal, 1 not.
"""
import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

# First and last code point of blocks whose letters take different paths through a pre-tokenizer.
BLOCKS = {
    "latin": (0x61, 0x7A), "capitals": (0x41, 0x5A), "latin-1": (0xC0, 0xFF), "latin extended": (0x100, 0x17F),
    "greek": (0x391, 0x3C9), "cyrillic": (0x410, 0x44F), "hebrew": (0x5D0, 0x5EA), "arabic": (0x621, 0x64A),
    "arabic marks": (0x64B, 0x652), "devanagari": (0x904, 0x94D), "bengali": (0x985, 0x9B9), "tamil": (0xB85, 0xBCD),
    "thai": (0xE01, 0xE4E), "georgian": (0x10D0, 0x10F0), "ethiopic": (0x1200, 0x1248), "hiragana": (0x3041, 0x3096),
    "katakana": (0x30A1, 0x30FA), "han": (0x4E00, 0x4FFF), "hangul": (0xAC00, 0xAD00), "hangul jamo": (0x1100, 0x1112),
    "combining": (0x300, 0x32F), "emoji": (0x1F600, 0x1F64F), "symbols": (0x2600, 0x26FF), "arrows": (0x2190, 0x21FF),
    "mathematics": (0x2200, 0x22FF), "fullwidth": (0xFF01, 0xFF5E), "arabic digits": (0x660, 0x669),
    "devanagari digits": (0x966, 0x96F), "superscripts": (0x2070, 0x2079), "fractions": (0x2150, 0x215E),
    "roman": (0x2160, 0x217F), "mathematical letters": (0x1D400, 0x1D433), "gothic": (0x10330, 0x1034A),
    "private": (0xE000, 0xE010), "punctuation": (0x2010, 0x2027), "currency": (0x20A0, 0x20BF),
}
WHITE = [" ", " ", " ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", "\r", "\u00A0", "\u2003", "\u3000", "\u200B", "\u2028",
         "\u0085", "\v", "\f", " \n ", "\n  \n", "\t\t ", "\ufeff"]
WORDS = ("the of and to in is you that it he was for on are with as his they be at one have this from or had by hot "
         "but some what there we can out other were all your when up use word how said an each she which do their time "
         "if will way about many then them would write like so these her long make thing see him two has look more day "
         "could go come did my sound no most number who over know water than call first people may down side been now "
         "find Hello World naïve café façade Straße señor Übermut coöperate jalapeño İstanbul ǅ ﬁne").split()
CONTRACTIONS = ["I'm", "you're", "it's", "don't", "we'll", "they'd", "I've", "'tis", "O'Neil", "rock'n'roll", "IT'S",
                "DON'T", "WE'LL", "You'Re", "l’été", "it’s", "'s", "''ll", "'Ve", "dogs'", "'", "y'all'd've"]
CODE = ["fn main() {\n    println!(\"{}\", x);\n}", "for (int i = 0; i < n; ++i) {\n\t\ta[i] += b[i];\n}",
        "x != y && z >= 3", "def f(a, *b, **c):\n        return a[::-1]", "#include <stdio.h>",
        "SELECT * FROM t WHERE a='b';", "</div><br/>", "https://example.org/a?b=c&d=%20", "foo_bar.bazQux->quux()",
        "/* ... */", "//====----", "\\n\\t\\\\", "$HOME/${x}", "a::b::<C<D>>()", "[[1, 2], [3.14e-10, -0x1F]]",
        "{\"k\": null}", "λx.x+1", "git commit -m 'x'", "~!@#$%^&*()_+`-="]
SPECIALS = ["<s>", "</s>", "<unk>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|im_start|>user\n", "<pad>",
            "<0x0A>", "<|im_start", "im_end|>", "<|", "|>", "<repo_name>", "<file_sep>", "<issue_start>",
            "<jupyter_code>", "[INST]", "<|im_end|><|im_end|>", " <|im_end|> ", "<|endoftext|>\n"]


def letters(rng):
    low, high = BLOCKS[rng.choice(list(BLOCKS))]
    return "".join(chr(rng.randint(low, high)) for _ in range(rng.randint(1, 12)))


def digits(rng):
    plain = "".join(rng.choice("0123456789") for _ in range(rng.randint(1, 14)))
    fraction = f"{rng.uniform(-1e6, 1e6):.{rng.randint(0, 6)}f}"
    return rng.choice([plain, fraction, f"{rng.randint(1, 10**9):,}", plain + rng.choice(WORDS)])


def emoji(rng):
    people = ["👨‍👩‍👧‍👦", "👍🏽", "🏳️‍🌈", "🇩🇪🇫🇷", "❤️", "☃", "e\u0301", "ñ", "n\u0303", "1️⃣", "🤷🏿‍♀️"]
    return "".join(rng.choice(people) for _ in range(rng.randint(1, 3)))


def cased(rng):
    word = rng.choice(WORDS)
    return rng.choice([word, word, word.upper(), word.capitalize(), word * 2])


def repeated(rng):
    unit = rng.choice(["a", " ", "\n", "=", "-", ".", "!", "0", "\t", "ä", "字", "😀", "_", "\r\n"])
    return unit * rng.randint(2, 40)


def any_text(rng):
    """A run of code points from all of Unicode, without surrogates."""
    points = (rng.randrange(0x110000 - 0x800) for _ in range(rng.randint(1, 6)))
    return "".join(chr(p if p < 0xD800 else p + 0x800) for p in points)


KINDS = [(cased, 8), (letters, 4), (lambda r: r.choice(CONTRACTIONS), 2), (lambda r: r.choice(CODE), 2), (digits, 2),
         (emoji, 1), (repeated, 1), (lambda r: r.choice(SPECIALS), 1), (lambda r: r.choice(WHITE), 2), (any_text, 1)]


def strings(count, seed):
    """`count` strings: first every fixed piece by itself, then random mixtures with random white space between."""
    rng = random.Random(seed)
    out = ["", *WHITE, *CONTRACTIONS, *CODE, *SPECIALS]
    kinds, weights = zip(*KINDS)
    while len(out) < count:
        parts = []
        for kind in rng.choices(kinds, weights, k=rng.randint(1, 14)):
            parts.append(kind(rng))
            if rng.random() < 0.7:
                parts.append(rng.choice(WHITE) if rng.random() < 0.4 else " ")
        text = "".join(parts)
        out.append(text.replace("\0", ""))  # llama.cpp's callers pass C strings in places
    return out[:count]


def reference(model, texts):
    """llama.cpp's ids: (plain, with special tokens recognised)."""
    from llama_cpp import Llama
    llm = Llama(model, vocab_only=True, verbose=False)
    plain = [llm.tokenize(t.encode(), add_bos=False, special=False) for t in texts]
    special = [llm.tokenize(t.encode(), add_bos=False, special=True) for t in texts]
    return plain, special


def ours(cli, model, texts, special):
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "in.json"
        source.write_text(json.dumps(texts))
        command = [cli, "tokenize", "-m", model, "--file", str(source), "--json", "--no-bos"]
        command += ["--parse-special"] if special else []
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"`{cli} tokenize` exited with {done.returncode}:\n{done.stderr.strip()}")
    ids = json.loads(done.stdout)
    if len(ids) != len(texts):
        sys.exit(f"expected {len(texts)} id arrays, got {len(ids)}")
    return ids


def compare(title, texts, expected, got, show):
    wrong = [i for i in range(len(texts)) if expected[i] != got[i]]
    for i in wrong[:show]:
        at = len(os.path.commonprefix([expected[i], got[i]]))
        print(f"{title}, string {i}: {texts[i]!r}\n    first difference at id {at}:"
              f" expected {expected[i][at:at + 8]}, got {got[i][at:at + 8]}")
    if len(wrong) > show:
        print(f"{title}: {len(wrong) - show} more")
    print(f"{title}: {len(texts) - len(wrong)} passed, {len(wrong)} failed")
    return len(wrong)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="GGUF file whose tokenizer is compared")
    parser.add_argument("--cli", help="our powerinfer program")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", type=Path, help="write strings and reference ids to this JSON file")
    parser.add_argument("--reference", type=Path, help="take strings and ids from a file written with --save")
    parser.add_argument("--show", type=int, default=10, help="mismatches to print for each way (default: %(default)s)")
    args = parser.parse_args()
    if not args.cli and not args.save:
        parser.error("give --cli, --save, or both")
    if args.reference:
        stored = json.loads(args.reference.read_text())
        texts, plain, special = stored["texts"], stored["ids"], stored["ids_special"]
    else:
        texts = strings(args.count, args.seed)
        plain, special = reference(args.model, texts)
    if args.save:
        args.save.write_text(json.dumps({"texts": texts, "ids": plain, "ids_special": special}) + "\n")
        print(f"{args.save}: ids of {len(texts)} strings")
    if args.cli:
        wrong = compare("plain", texts, plain, ours(args.cli, args.model, texts, False), args.show)
        wrong += compare("special", texts, special, ours(args.cli, args.model, texts, True), args.show)
        sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
