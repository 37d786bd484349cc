r"""Splits answers in LaTeX or plain text into tokens; different notations of one thing give the same token.

    "$x = 10,\!080\text{ cm}^2$."  ->  sym x, op =, num 10080, word cm, op ^, num 2

The content of `\text{...}` becomes words. Other letters become one variable each, except names of functions,
units after a number, "or" and "and". Outside brackets a comma between groups of three digits belongs to the
number, if `thousands` is set.
"""

from __future__ import annotations

import dataclasses
import re
from fractions import Fraction

# These bound the work of parsing and comparing.
MAX_CHARS = 2000
MAX_TOKENS = 800
MAX_DIGITS = 400


class Unreadable(Exception):
    """A text has no meaning for the parser, or several."""


@dataclasses.dataclass(frozen=True)
class Token:
    """A token of an answer.

    Attributes:
      kind: "num", "sym", "word", "cmd" or "op".
      text: text as written; commands have no backslash.
      spaced: whether there is space before the token.
    """

    kind: str
    text: str
    spaced: bool = False


_UNICODE = {
    "\u2212": "-", "\u2013": "-", "\u00d7": r"\times ", "\u00f7": "/", "\u00b7": r"\cdot ",
    "\u22c5": r"\cdot ", "\u03c0": r"\pi ", "\u221a": r"\sqrt ", "\u221e": r"\infty ", "\u2264": r"\le ",
    "\u2265": r"\ge ", "\u2260": r"\ne ", "\u00b1": r"\pm ", "\u00b0": r"^{\circ}", "\u222a": r"\cup ",
    "\u2229": r"\cap ", "\u2208": r"\in ", "\u00b2": "^{2}", "\u00b3": "^{3}", "\u03b8": r"\theta ",
    "\u03b1": r"\alpha ", "\u03b2": r"\beta ", "\u211d": r"\reals ", "\u2248": r"\approx ",
    "\u00bd": r"\frac{1}{2}", "\u00bc": r"\frac{1}{4}", "\u00be": r"\frac{3}{4}", "\uff0c": ",",
    "\u3001": ",", "\uff1b": ";", "\uff08": "(", "\uff09": ")", "\u00a0": " ", "\u2009": " ", "\u202f": " ",
    "\u2019": "'", "\u2220": r"\angle ", "\u2205": r"\emptyset ", "\u20ac": r"\euro ", "\u00a3": r"\pounds ",
}  # fmt: skip

_TEXT_COMMANDS = (
    "text|textbf|textit|textrm|textsf|texttt|textnormal|mathrm|mathbf|mathit|mathsf|mathcal|mbox|hbox"
    "|operatorname|emph|bold|boldsymbol|mathop|rm|bf"
)
_TEXT_COMMAND = re.compile(rf"\\(?:{_TEXT_COMMANDS})\*?\s*\{{([^{{}}]*)\}}")

# Marks around the content of \text{...}.
_OPEN, _CLOSE = "\x01", "\x02"

_DRESS = "left|right|bigl?|bigr|Bigl?|Bigr|biggl?|biggr|displaystyle|textstyle|limits|hfill|strut"
# Commands of one meaning.
_SYNONYMS = {
    **dict.fromkeys(("dfrac", "tfrac", "cfrac"), r"\frac"),
    **dict.fromkeys(("dbinom", "tbinom"), r"\binom"),
    **dict.fromkeys(("leq", "leqslant"), r"\le "),
    **dict.fromkeys(("geq", "geqslant"), r"\ge "),
    **dict.fromkeys(("backslash", "smallsetminus", "setminus"), r"\setminus "),
    **dict.fromkeys(("lvert", "rvert", "vert", "mid"), "|"),
    **dict.fromkeys(("ast", "cdot", "times"), "*"),
    **dict.fromkeys(("ldots", "cdots"), r"\dots "),
    **dict.fromkeys(("R", "Reals"), r"\reals "),
    "neq": r"\ne ", "lt": "<", "gt": ">", "varnothing": r"\emptyset ", "lbrace": r"\{", "rbrace": r"\}",
    "lbrack": "[", "rbrack": "]", "degrees": r"\degree ", "div": "/", "infin": r"\infty ", "mp": r"\pm ",
}  # fmt: skip


def _one_command(command: re.Match[str]) -> str:
    return _SYNONYMS.get(command[1]) or command[0]


_REWRITES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\{,\}(?=\s*[0-9])|,\\!\s*(?=[0-9])", "\x03"),  # always a separator of thousands
        (r"(?<=[0-9])\\[,;:!]\s*(?=[0-9]{3}(?![0-9]))", "\x03"),
        (rf"\\(?:{_DRESS})(?![A-Za-z])\.?", " "),
        (r"\\(?:q?quad|enspace|thinspace|hspace\s*\{[^{}]*\})(?![A-Za-z])", " "),
        (r"\\[,;:! ]|\\~|(?<=[A-Za-z0-9}.,])~|\\/", " "),
        (r"\\[()\[\]]", " "),
        (r"\\(?:boxed|fbox)(?![A-Za-z])", " "),
        (r"\\mathbb\s*\{?\s*R\s*\}?", r"\\reals "),
        (r"\\([A-Za-z]+)(?![A-Za-z])", _one_command),
        (r"\\degree(?![A-Za-z])|\^\s*\\circ(?![A-Za-z])|\^\s*\{\s*\\circ\s*\}", r"\\degree "),
        (r"<=", r"\\le "),
        (r">=", r"\\ge "),
        (r"!=|\\not\s*=", r"\\ne "),
        (r"\*\*", "^"),
        (r"\.\.\.|\u2026", r"\\dots "),
    )
)

FUNCTIONS = frozenset({
    "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "sinh", "cosh", "tanh",
    "ln", "log", "exp",
})  # fmt: skip
_ASCII = {
    **{name: name for name in FUNCTIONS},
    "asin": "arcsin", "acos": "arccos", "atan": "arctan", "sqrt": "sqrt", "pi": "pi", "infinity": "infty",
    "infty": "infty", "inf": "infty", "oo": "infty", "theta": "theta", "alpha": "alpha", "beta": "beta",
    "frac": "frac", "lg": "log", "union": "cup", "U": "cup", "cup": "cup", "degrees": "degree",
    "degree": "degree",
    "percent": "%", "deg": "degree",
}  # fmt: skip
_GREEK = frozenset({
    "alpha", "beta", "gamma", "delta", "epsilon", "varepsilon", "zeta", "eta", "theta", "vartheta",
    "iota", "kappa", "lambda", "mu", "nu", "xi", "rho", "sigma", "tau", "phi", "varphi", "chi",
    "psi", "omega", "Gamma", "Delta", "Theta", "Lambda", "Xi", "Sigma", "Phi", "Psi", "Omega",
    "ell", "hbar",
})  # fmt: skip
WORDS = frozenset(("or", "and", "in", "not"))

# Units and counted things. The first name of each group stands for all. Whole words after a number only.
_UNIT_NAMES = """
cm centimeter centimeters centimetre centimetres; mm millimeter millimeters; km kilometer kilometers
kilometre kilometres; meter meters metre metres; mile miles mi; foot feet ft; inch inches; yard yards yd
yds; kg kilogram kilograms; gram grams; mg milligram milligrams; pound pounds lb lbs; ounce ounces oz;
ton tons; liter liters litre litres; ml milliliter milliliters; gallon gallons gal; cup cups; quart
quarts; pint pints; second seconds sec secs; minute minutes min mins; hour hours hr hrs; day days; week
weeks; month months; year years yr yrs; dollar dollars usd; cent cents; euro euros; mph; acre acres;
radian radians rad; unit units; point points; way ways; time times; people person persons; student
students; boy boys; girl girls; child children; man men; woman women; integer integers; number numbers;
digit digits; edge edges; vertex vertices; side sides; meal meals; piece pieces; value values; solution
solutions; root roots; zero zeros zeroes; term terms; factor factors; divisor divisors; prime primes;
pair pairs; triple triples; subset subsets; set sets; element elements; function functions; triangle
triangles; square squares; rectangle rectangles; circle circles; line lines; path paths; route routes;
card cards; ball balls; marble marbles; book books; page pages; apple apples; orange oranges; egg eggs;
coin coins; penny pennies; nickel nickels; dime dimes; quarter quarters; ticket tickets; game games; team
teams; player players; match matches; car cars; bus buses; tree trees; flower flowers; dog dogs; cat
cats; fish; bird birds; cow cows; sheep; chicken chickens; cookie cookies; candy candies; cake cakes;
pizza pizzas; slice slices; box boxes; bag bags; bottle bottles; toy toys; pencil pencils; pen pens;
house houses; room rooms; table tables; chair chairs; seat seats; shirt shirts; shoe shoes; step steps;
trip trips; lap laps; floor floors; arrangement arrangements; combination combinations; permutation
permutations; outcome outcomes; choice choices; possibility possibilities; case cases; color colors;
colour colours; item items; member members; committee committees; word words; letter letters; question
questions; problem problems; answer answers; vote votes; stamp stamps; sticker stickers; calorie
calories; joule joules; watt watts; newton newtons; volt volts; ohm ohms; mole moles; bacteria; block
blocks; cube cubes; tile tiles; region regions; rabbit rabbits; kilowatt kilowatts; knot knots; gold; kph
kmph; handshake handshakes; diagonal diagonals; daps; baps; yaps; worker workers; friend friends; guest
guests; chocolate chocolates; gift gifts
"""
UNITS: dict[str, str] = {
    name: names.split()[0] for names in _UNIT_NAMES.split(";") for name in names.split()
}
# Words allowed before or between units.
UNIT_WORDS = frozenset(("square", "sq", "cubic", "per", "total", "distinct", "different", "of"))

SCIENTIFIC = (
    r"(?<![0-9.,])[1-9](?:[eE](?:[0-9]{1,2}|[+-]0[0-9])|\.[0-9]+[eE][+-]?[0-9]{1,2})"
    r"(?![0-9A-Za-z.^_!])"
)
"""Matches 1.5e3, 2e6 and 1e-05. With a sign it needs a point or a 0, as "2e-1" is also 2 times e minus 1."""

_TOKEN = re.compile(
    rf"(?P<num>{SCIENTIFIC}|[0-9]+(?:\x03[0-9]{{3}})*(?:\.[0-9]+)?|\.[0-9]+)"
    r"|\\(?P<cmd>[A-Za-z]+|[{}%$&#_|\\])"
    r"|(?P<letters>[A-Za-z]+)"
    r"|(?P<op>[-+*/^_!=<>()\[\]{},;:|&%'?.])"
    r"|(?P<space>[\s$\x01\x02]+)"
)
_THOUSANDS = re.compile(r"(?<![0-9A-Za-z,.\\_^])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])(?!,[0-9])")
_SPACED = re.compile(r"(?<![0-9A-Za-z,.\\_^])[0-9]{1,3}(?: [0-9]{3})+(?![0-9])(?! [0-9])")
_DEPTH = re.compile(r"\\\{|\\\}|[()\[\]]")


def tokens_of(text: str, *, thousands: bool = True) -> list[Token]:
    """Returns the tokens of an answer.

    Args:
      text: answer of at most `MAX_CHARS` characters.
      thousands: whether a comma may separate thousands.

    Raises:
      Unreadable: The text is too long or contains an unknown character.
    """
    if len(text) > MAX_CHARS:
        raise Unreadable("too long")
    text = _clean(text, thousands=thousands)
    tokens: list[Token] = []
    words = spaced = False
    place = 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise Unreadable(f"{text[place]!r} has no meaning here")
        place = match.end()
        kind, found = match.lastgroup, match[0]
        if kind == "space":
            for sign in found:
                words = sign == _OPEN or (words and sign != _CLOSE)
            spaced = True
            continue
        if kind == "letters":
            tokens += _of_letters(found, words, spaced, tokens)
        elif kind == "num":
            if len(found) > MAX_DIGITS:
                raise Unreadable("a number is too long")
            tokens.append(Token("num", found.replace("\x03", ""), spaced))
        elif kind == "cmd":
            name = match["cmd"]
            greek = "sym" if name in _GREEK else "cmd"
            tokens.append(Token(greek, name, spaced))
        else:
            tokens.append(Token("op", found, spaced))
        spaced = False
        if len(tokens) > MAX_TOKENS:
            raise Unreadable("too many parts")
    return tokens


def _clean(text: str, *, thousands: bool) -> str:
    text = text.translate(str.maketrans(_UNICODE))
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    while True:
        unwrapped = _TEXT_COMMAND.sub(rf"{_OPEN}\1{_CLOSE}", text)
        if unwrapped == text:
            break
        text = unwrapped
    if thousands:
        for pattern in (_THOUSANDS, _SPACED):
            before = text
            text = pattern.sub(lambda m, whole=before: _joined(m, whole), before)
    return text


def _joined(match: re.Match[str], text: str) -> str:
    """Removes the commas of a number; keeps them inside brackets, where they separate items."""
    depth = 0
    for bracket in _DEPTH.finditer(text, 0, match.start()):
        depth += 1 if bracket[0] in (r"\{", "(", "[") else -1
    return match[0] if depth else re.sub("[ ,]", "", match[0])


def _of_letters(letters: str, words: bool, spaced: bool, before: list[Token]) -> list[Token]:
    """Returns one token per variable, or one for a word or a function."""
    lower = letters.lower()
    after_number = bool(before) and before[-1].text not in ("*", "/", "+", "-", "=", "^", "_")
    if words:
        if lower in ("degree", "degrees"):
            return [Token("cmd", "degree", spaced)]
        if lower == "percent":
            return [Token("op", "%", spaced)]
        return [Token("word", letters, spaced)]
    if letters in _ASCII and (letters != "U" or spaced):
        name = _ASCII[letters]
        kind = "op" if name == "%" else "sym" if name in _GREEK else "cmd"
        return [Token(kind, name, spaced)]
    if lower in WORDS or (after_number and (lower in UNITS or lower in UNIT_WORDS)):
        return [Token("word", letters, spaced)]
    return [Token("sym", letter, spaced and n == 0) for n, letter in enumerate(letters)]


def is_op(token: Token, *texts: str) -> bool:
    """Returns whether a token is one of these operators."""
    return token.kind == "op" and token.text in texts


def number_of(token: Token) -> Fraction:
    """Returns the value of a number's token."""
    return Fraction(token.text)
