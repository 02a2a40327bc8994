"""Which text after `####` is which number, and that a part of an expression is never read as its value."""

import random

import pytest

from cookbook.core.numbers import extract_answer, normalize_number

READ = {
    "18": [
        "18", " 18 ", "18.", "18.0", "+18", "018", "18\n", "18\r\nnext line", "18.\n\n3 more lines",
        # brackets, formulas and boxes
        r"\boxed{18}", r"$\boxed{18}$", r"\[\boxed{18}\]", "\\[\n18\n\\]", "$$\n18\n$$", r"\(18\)", r"\( 18 \)", "$18$",
        "$$18$$", "(18)", "((18))", "{18}", r"\text{18}", r"\textbf{18}", r"\mathbf{18}", r"\mathrm{18}", r"\fbox{18}",
        r"\boxed{\text{18}}", r"\boxed{ 18 }", r"\boxed {18}", r"\boxed{18}.", r"$18$.", r"\displaystyle 18",
        r"\boxed{18\text{ apples}}", r"\boxed{18 \text{ apples}}", r"\boxed{18}\text{ apples}", r"\boxed{18~\text{kg}}",
        r"\text{18 apples}", r"\boxed{18\ \mathrm{km}}", r"\(18\text{ dollars}\)", r"18\,\text{cm}", "18}", "18)",
        # emphasis
        "**18**", "*18*", "__18__", "`18`", "***18***", "**$18$**", "**18**.", "**18.**", "**18** apples", "** 18",
        # currency, percent, degrees
        "$18", r"\$18", "$ 18", "18$", "€18", "18€", "£18", "¥18", "₹18", "18%", r"18\%", "18 %", r"$18\%$", "18°",
        r"$18^\circ$", r"18^{\circ}", "18¢", r"\$18.00", r"\boxed{\$18}", "18 °C",
        # units and remarks
        "18 apples", "18 dollars", "18 dollars.", "18kg", "18 km/h", "18/day", "18 / day", "18 m", "18 g", "18-inch",
        "18 a day", "18 apples, as shown", "18, as shown", "18 (that is 6 * 3)", "18 times", "18th",
        "18. That is 6 * 3.", "18 apples. So 5 remain.", "18 dollars per week", "18 - as shown", "18 — that is all",
        "18 apples!", "18 people's hats", "18</answer>", "18<|im_end|>", "18 ✅", '18"', "18 lbs.", "18元", "18 яблок",
        "18 apples and oranges", "18 apples; done", "18。", "18 of them",
        # other spellings
        "１８", "＄１８",
    ],
    "1250": [
        "1250", "1,250", "1,250.00", r"1{,}250", r"1\,250", r"1,\!250", r"1\!250", r"\$1,250", r"\boxed{1{,}250}",
        r"\boxed{\$1,\!250}", r"$1\,250$", "１，２５０", "(1,250)", "**1,250**",
    ],
    "-5": ["-5", "-$5", "$-5", r"-\$5", "\u22125", "\u20135", "(-5)", r"\boxed{-5}", "$-5$", "-5.0 degrees", "**-5**"],
    "0.5": [".5", "0.5", "0.50", r"\boxed{0.5}", r"\boxed{.5}", "0.5%", "$0.50"],
    "1234567": ["1,234,567", "12,34,567", r"1{,}234{,}567", r"1\,234\,567", r"1,\!234,\!567"],
}  # fmt: skip

REFUSED = {
    "powers and factorials": [
        "10**6", "10^6", "10^{6}", "10⁶", "10²", "10⁻²", "10ⁿ", "10ˣ", "10 ^ 6", "10 ** 6", "10**n", "10** n", "10*n",
        "**10**6", "5!", "5!!", "(5)!", r"\boxed{5}!", "(5)^2", r"\boxed{5}^2", r"$5^2$", "5 squared", "5 cubed",
        "5 to the power of 3", "2**k", "1e3", "1E+3", "1e-3", "5e", "1.5e3", "5.x",
    ],
    "fractions and mixed numbers": [
        "3½", "3 ½", "½", "3¼", "7/8", "7 / 8", "7⁄8", "7∕8", "7÷8", r"3\frac{1}{2}", r"3 \frac{1}{2}", r"\frac{3}{4}",
        r"3\tfrac12", "3 3/4", "3-3/4", "3 and 3/4", "3 and a half", "3 and one half", "3 halves", "3 quarters",
        "2 thirds", "3 over four", "⅓", "3⅓", "5/x", "5 / n", "3 1⁄2", "5 分之三", "5半",
    ],
    "products and sums": [
        r"2 \times 7", r"2\times7", r"2 \cdot 7", "2 × 7", "2×7", "2 x 7", "2x7", "2·7", "2⋅7", "2∗7", "2*7", "2 * 7",
        "2 * k", "2*(7)", "2(7)", "(2)(7)", "2 (3 + 4)", "2(3+4)", r"\boxed{2}\boxed{7}", r"2\left(7\right)", "2 ✕ 7",
        "2 + 7", "2+7", "2 - 7", "2-7", "2 ± 1", "2 plus 7", "2 plus seven", "10 minus three", "10 - three", "2 & 7",
        r"\(2\) \(7\)", "$2$ $7$", "$2$7", "2 = 7", "2 = 14 / 7", "2 == 2", "5 mod 3", "5 (mod 7)", "5 % 3", "5%3",
        "5 divided by 2", "(5 + 2)", "(5", r"\boxed{5", "(14\n+ 2)", "5)(3)", "√5", "5√2", "5 sqrt 2", "5π", "5 pi",
        "2|7",
    ],
    "ratios, times, ranges, lists": [
        "9 : 4", "9:4", "9∶4", "12:30", "9 to 4", "9 out of 10", "9 of 10", "3-5", "3–5", "3 - 5", "3~5", "3 to 5",
        "3 to five", "3..5", "3…5", "3 or 4", "3, 4", "3,4", "3; 4", "3,4,5", "3 4", "3\t4", "3\u202f4", "3\xa04",
        "3 < 4", "3 > x", "3 ≤ 4", "3 -> 4", "3 → 4", "5 ft 6 in", "5' 6\"", "5 hours 30 minutes",
        "5 dollars and 30 cents",
        "5 apples, 6 pears", "[5, 6]", "{5, 6}", "(5, 6)", "5, 6 or 7", "3. 4",
    ],
    "numbers of another size": [
        "5 k", "5k", "5K", "5M", "5 M", "5 B", "5 bn", "5 mil", "5 thousand", "5 million", "5 millions", "5 billion",
        "5 hundred", "5 dozen", "5 dozen eggs", "5 lakh", "5 crore", r"5\text{ million}", r"\boxed{5\text{ k}}", "5万",
        "5 千", "5亿", "5 permille", "5‰", "5 million-dollar", r"5\%o2", "5x", "5 x", "5n", "5 n", "5i", "5 i", "5a",
    ],
    "parts of numbers": [
        "1 000", "1_000", "1'000", "1.000,5", "1,5", "1234,567", "1,23,4", "1.2.3", "0x1F", "10101_2", "10_{2}", "10₂",
        "3.333...", "0.3\u0305", "5\u0665", "\u0665", "5٥", "5५", "1\u200b8", "1\u20608", "①", "5①", "Ⅴ", "5Ⅴ", "५",
        r"0.\overline{3}", r"0.3\overline{3}", "5..", "1\x000", r"5\ldots", "5️⃣",
    ],
    "no number": ["", "x", "x = 5", "= 5", "~5", "≈5", "±5", "--5", "+-5", "- 5", "-(5)", "the answer is 5", "f(5)",
                  r"\sqrt{5}", "<5", ">5", "No. 5", "inf", "nan", "."],
}  # fmt: skip


@pytest.mark.parametrize(("number", "text"), [(number, text) for number, texts in READ.items() for text in texts])
def test_what_models_write_is_read(number: str, text: str):
    assert extract_answer(f"so 7\n#### {text}") == number


@pytest.mark.parametrize(("kind", "text"), [(kind, text) for kind, texts in REFUSED.items() for text in texts])
def test_a_part_of_an_expression_is_not_an_answer(kind: str, text: str):
    assert extract_answer(f"so 7\n#### {text}") is None, kind


OPERATORS = [
    "+", "-", "*", "/", "^", "**", "×", "÷", "·", "⋅", "∗", "⁄", "∕", "∶", ":", "=", "<", ">", "≤", "≈", "±", "−",
    "–", "~",
    "|", "&", "_", "'", "→", "->", "//", "%", "!", ",", " ", "\t", "\xa0", "\u2009", "...", "…", "(", "[", "{", "²",
    "⁻",
    r"\times", r"\cdot", r"\div", r"\over", r"\pm", r"\frac", r"\,", r"\ ", "{,}", "e", "E", "x", "to", "or", "and",
    "of",
    "mod", "plus", "minus", "times", "divided by", "over", "thousand", "and a half",
]  # fmt: skip
OPERANDS = [
    "7",
    "12",
    "3.5",
    "0",
    "½",
    "³",
    "(7)",
    "{7}",
    r"\frac{1}{2}",
    r"\sqrt{2}",
    "٣",
    "七",
    "seven",
    "x",
    "n",
    "π",
]


def test_a_number_inside_a_random_expression_earns_nothing():
    draw = random.Random(0)
    for _ in range(20_000):
        number = str(draw.randint(2, 9999))
        parts = [number]
        for _ in range(draw.randint(1, 3)):
            operator = draw.choice(OPERATORS)
            spaces = [" "] if operator.replace(" ", "").isalpha() else ["", " "]
            parts += [draw.choice(spaces), operator, draw.choice(spaces), draw.choice(OPERANDS)]
        expression = "".join(parts)
        wrapped = draw.choice(["{}", "{} ", "${}$", r"\({}\)", r"\boxed{{{}}}", "({})", "**{}**"]).format(expression)
        assert extract_answer(f"#### {wrapped}") != number, wrapped


def test_an_expression_around_a_number_is_not_read_either():
    draw = random.Random(1)
    for _ in range(5_000):
        number = str(draw.randint(2, 9999))
        before = draw.choice(
            [r"\frac{1}{", r"\sqrt{", "f(", "-(", "1 + (", "2(", "x = ", "2 * ", "|", "⌊", "√", "10^", "3½ ", "= "]
        )
        assert extract_answer(f"#### {before}{number}") is None, before


def test_the_number_begins_the_text():
    assert normalize_number(" $1,000.0 ") == "1000"
    assert normalize_number("about 5") is None
