"""Which answers are one: cases labelled by hand, a truth with what says the same and with what does not."""

import contextlib
import json
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl.rewards.answer_reader.answer_equality import equal
from jaxrl.rewards.answer_reader.answer_parser import read_answer
from jaxrl.rewards.answer_reader.answer_tokens import Unreadable
from tests.rewards.answer_cases import EQUAL, UNEQUAL

DATA = pathlib.Path(__file__).parents[2] / "../shared/data"

RIGHT = {
    "-7": ["-7 = x", "-7^\\circ"],
    "42": [
        "42",
        "42.0",
        "a+b+c=42",
        r"\angle ABC = 42^\circ",
        "84/2=42",
        r"\{42\}",
        r"42 \text{ square feet}",
        "$42$ apples",
        "**42**",
        "$$42$$",
        r"\[42\]",
        "42.",
        "042",
        r"\text{42}",
        r"\mathbf{42}",
        "{42}",
        "(42)",
        r"42 \text{ units}",
        "= 42",
        "+42",
        r"42\,",
        r"\boxed{42}",
        r"x=6\cdot 7=42",
    ],
    "1/2": [r"\frac12"],
    r"\frac{1}{2}": ["0.5", "1/2"],
    "x=5": ["5"],
    "5": ["x=5", r"\$5"],
    r"1\frac{4}{5}": ["9/5", "1.8"],
    r"137 \frac{1}{2}": ["137.5"],
    r"11\sqrt2": [r"\sqrt{242}"],
    r"\frac{\sqrt{3}}{3}": [r"\frac{1}{\sqrt{3}}"],
    r"1 \pm \sqrt{19}": [r"1+\sqrt{19}, 1-\sqrt{19}"],
    r"\{1\pm\sqrt{5},-2\}": [r"-2, 1-\sqrt5, 1+\sqrt5"],
    r"(-\infty, 2) \cup (3, \infty)": [r"x<2 \text{ or } x>3"],
    "(3,4]": [r"3 < x \le 4"],
    r"x \in [-2,7]": ["[-2,7]"],
    r"\begin{pmatrix} -1/3 \\ 2/3 \\ 5/3 \end{pmatrix}": [
        r"\begin{bmatrix} -\frac13 \\ \frac23 \\ \frac53 \end{bmatrix}"
    ],
    r"\begin{pmatrix} -1/3 \\ 2/3 \end{pmatrix}": [
        r"\frac{1}{3}\begin{pmatrix} -1\\2\end{pmatrix}"
    ],
    "5x - 7y + 11z + 4 = 0": ["-5x+7y-11z=4"],
    "y = 2x + 3": ["2x-y+3=0", "2x+3"],
    "(a+5)(b+2)": ["ab+2a+5b+10"],
    r"\text{Evelyn}": ["Evelyn"],
    r"\text{(C)}": ["C", "(C)"],
    r"\text{Monday}": [r"\text{monday}", "Monday", "monday.", r"\textbf{Monday}"],
    "52_8": ["52_{8}"],
    "4210_{5}": ["4210_5", r"4210_{\text{five}}"],
    r"90^\circ": ["90", "90 degrees", r"\frac{\pi}{2}"],
    r"\$32,\!348": ["32348", r"\$32,348.00"],
    r"\$18.90": ["18.9 dollars"],
    r"864 \mbox{ inches}^2": ["864", "864 square inches"],
    r"15\mbox{ cm}^2": [r"15\text{ cm}^{2}"],
    r"5.4 \text{ cents}": ["5.4"],
    r"10,\!080": ["10080", "10{,}080"],
    r"20\%": ["20", "0.2", r"\frac{1}{5}"],
    r"\frac{270}7\text{ degrees}": [r"\frac{270}{7}^\circ"],
    "6-5i": ["-5i+6"],
    "x^5 - x^4 + x^3 - x^2 + x - 1": ["(x-1)(x^4+x^2+1)"],
    r"\cot x": [r"\frac{\cos x}{\sin x}"],
    r"2, 3, \text{ and } 4": ["2,3,4"],
    "2^{4181}": [r"2^{4180}\cdot 2"],
    "3628800": ["10!"],
    r"\frac{2ab}{a^2 + b^2}": ["2ab/(a^2+b^2)"],
    r"\left( 3, \frac{\pi}{2} \right)": [r"(3,\pi/2)"],
    "(1,2)": ["x=1, y=2"],
    r"(-\infty,2)\cup(2,\infty)": [r"\mathbb{R}\setminus\{2\}"],
    r"(-\infty,\infty)": [r"\mathbb{R}"],
    "1:4": ["1 : 4"],
    r"0.\overline{3}": [r"\frac13"],
    r"\frac{1}{3}": [r"0.\overline{3}", r"\frac{1}{3} \approx 0.333"],
    r"\sqrt[4]{8}": ["8^{1/4}"],
    r"\log\left(\frac{2007}{2006}\right)": [r"\log 2007 - \log 2006"],
    r"\approx 8.24 \text{ mph}": ["8.24"],
    r"\tan 15^\circ": [r"2-\sqrt3"],
    r"5 \times 10^{3}": ["5000"],
    "5000": [r"5 \times 10^3"],
    "1,-2": ["-2, 1", r"x=1 \text{ or } x=-2"],
    r"10^\circ, 50^\circ, 54^\circ": ["10, 50, 54"],
    "(6,31,-1)": [r"\langle 6,31,-1\rangle"],
    r"\sqrt{51}": ["sqrt(51)"],
    "2k+2": ["2(k+1)"],
    r"\frac{8-7x}{6}": [r"\frac43 - \frac{7x}{6}"],
    r"42x\sqrt{5x}": [r"42\sqrt{5}x^{3/2}"],
    r"\frac12\sin 2x": [r"\sin x\cos x"],
    "(3y - 5)^2": ["9y^2-30y+25"],
    r"\text{A5}_{11}": ["A5_{11}"],
    r"\frac 74,7": ["7, 7/4"],
    r"-\frac34i": [r"-\frac{3i}{4}"],
    r"\text{B,E}": ["E, B"],
    r"\sqrt{3+2\sqrt{2}}": [r"1+\sqrt2"],
    r"\emptyset": [r"\{\}", r"\varnothing"],
    r"12\sqrt{13}\text{ feet}": [r"12\sqrt{13}"],
    "10080": ["10 080"],
    r"-\frac{1}{2}": [r"\frac{-1}{2}", "-0.5"],
    r"2\sqrt{3}": [r"\sqrt{12}"],
    r"\frac{\sqrt{2}}{2}": [r"\frac{1}{\sqrt{2}}", "2^{-1/2}"],
    "x^2+2x+1": ["(x+1)^2", "x^{2}+2x+1"],
    "2x+3": ["3+2x"],
    r"\frac{x+1}{2}": [r"\frac{1}{2}x+\frac{1}{2}", "0.5x+0.5"],
    r"\frac{3}{4}": [r"75\%"],
    "0.75": [r"75\%"],
    r"75\%": [r"\frac34"],
    r"150\%": [r"150 \text{ percent}"],
    r"50\%": ["50 percent"],
    r"\$5": ["5 dollars", "5"],
    r"\$5.00": ["5"],
    "1000000": ["1{,}000{,}000", "10^6", "1,000,000"],
    "3.5": [r"3\frac12"],
    r"3\frac12": ["7/2"],
    r"3\frac{1}{2}": ["3 1/2"],
    r"\frac{7}{2}": [r"3\tfrac{1}{2}"],
    "Monday": [r"\text{Monday}"],
    r"\text{no solution}": ["No solution"],
    r"\text{yes}": ["Yes"],
    r"\text{even}": [r"\mathrm{even}"],
    "(2,3)": ["(2, 3)", r"\left(2,3\right)", "(x,y)=(2,3)", "(4/2, 3.0)"],
    "[2,3)": [r"\left[2,3\right)", r"2\le x<3"],
    r"(-\infty,3)": ["x<3"],
    r"(-\infty,3]": [r"x \leq 3", r"3 \ge x"],
    r"(-\infty,-1)\cup(1,\infty)": [
        r"(1,\infty)\cup(-\infty,-1)",
        "x<-1 or x>1",
        r"x \in (-\infty,-1)\cup(1,\infty)",
    ],
    r"\{1,2,3\}": [r"\{3,2,1\}", "1,2,3"],
    "1,2,3": [r"\{1, 2, 3\}", "3, 2, 1"],
    "1,2": [r"1 \text{ and } 2", "1 and 2"],
    r"\pm 2": ["2, -2", "-2, 2"],
    "2,-2": [r"\pm 2", r"x = \pm 2"],
    "x=3": ["3"],
    "3": ["x=3", "$x = 3$", r"\log_2 8"],
    "y=2x+1": ["2x+1", "y = 1+2x", "y-2x-1=0"],
    "x=3, y=4": ["x=3,y=4", "(3,4)"],
    r"\begin{pmatrix}1&2\\3&4\end{pmatrix}": [
        r"\begin{bmatrix}1&2\\3&4\end{bmatrix}",
        r"\left(\begin{array}{cc}1&2\\3&4\end{array}\right)",
        r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \\ \end{pmatrix}",
    ],
    r"30^\circ": ["30", r"30 \text{ degrees}", "30°"],
    "30": [r"30^\circ"],
    r"\frac{\pi}{6}": [r"30^\circ"],
    "101_2": ["101_{2}", "(101)_2", r"101_{\text{two}}"],
    r"\text{(A)}": ["A", r"\textbf{(A)}"],
    "A": ["(A)"],
    "C": [r"\text{C}"],
    "i": ["i"],
    "3+4i": ["4i+3"],
    "e^2": ["e^{2}"],
    r"\ln 2": [r"\ln(2)"],
    r"\ln 4": [r"2\ln 2"],
    r"\log_2 8": ["3"],
    r"\sin^2 x": [r"(\sin x)^2", r"1-\cos^2 x"],
    r"\tan x": [r"\frac{\sin x}{\cos x}"],
    "5!": ["120"],
    "120": ["5!"],
    r"\binom{5}{2}": ["10"],
    r"0.\overline{6}": [r"\frac23"],
    r"\frac{22}{7}": [r"22 \div 7"],
    r"12\text{ cm}": ["12", "12 cm", "12 centimeters"],
    r"12\text{ cm}^2": [r"12 \text{ square centimeters}", r"12 \text{ cm}^2"],
    "12": [r"12\text{ cm}", "12 cm^2"],
    r"5 \text{ hours}": ["5", "5 hrs"],
    r"1.5 \times 10^{8}": ["150000000"],
    "150000000": [r"1.5 \times 10^8", r"1.5\cdot10^8"],
    "2:3": ["2:3", "4:6"],
    "f(x)=x^2": ["x^2"],
    "x^2": ["f(x) = x^2"],
    r"\sqrt{2}+\sqrt{3}": [r"\sqrt{3}+\sqrt{2}"],
    r"\sqrt{5+2\sqrt6}": [r"\sqrt2+\sqrt3"],
    r"\frac{1+\sqrt{5}}{2}": [r"\frac12+\frac{\sqrt5}2"],
    r"\sqrt[3]{2}": ["2^{1/3}", r"2^{\frac{1}{3}}"],
    r"\infty": [r"\infty"],
    r"-\infty": [r"-\infty"],
    r"\mathbb{R}": [r"(-\infty,\infty)"],
    r"\text{all real numbers}": [r"\mathbb{R}"],
    r"(-\infty,0)\cup(0,\infty)": [r"x\neq 0", r"\mathbb{R} \setminus \{0\}"],
    r"\frac{a}{b}": ["a/b"],
    "a+b": ["b+a"],
    "ab": ["ba"],
    "2ab": ["2ba"],
    "x^{10}": ["x^10"],
    "(x-1)(x+1)": ["x^2-1"],
    "n(n+1)/2": [r"\frac{n^2+n}{2}"],
    r"\frac{n(n+1)}{2}": ["n(n+1)/2"],
    "|x|": [r"\lvert x\rvert"],
    r"60^\circ, 120^\circ": [r"60^\circ, 120^\circ", "60, 120"],
    "1234": [r"1\,234"],
    "-5": ["\u22125", "(-5)"],
    "0": ["-0"],
    r"\frac{-3}{-4}": [r"\frac34"],
    r"\frac{6}{8}": [r"\frac34"],
    "3x+2y=6": [r"y = 3-\frac{3}{2}x", "6x+4y=12"],
    "x^2+y^2=4": ["x^2+y^2-4=0"],
    r"\frac{\pi}{4}": [r"\pi/4", r"0.25\pi"],
    r"2\pi": [r"2 \cdot \pi"],
    r"\frac{3\pi}{4}": [r"\frac{3}{4}\pi"],
    r"7\text{ apples}": ["7"],
    "7": ["7 apples", r"7\text{ apples}"],
    r"1\text{ and }2": ["1, 2"],
    r"\text{8:30}": ["8:30"],
    r"\text{odd}": ["odd"],
    "x>3": ["x > 3", "3 < x", r"(3,\infty)"],
    "1<x<3": ["(1,3)"],
    r"-1 \le x \le 1": ["[-1,1]"],
    "x^3-2x+C": ["x^3 - 2x + C"],
    r"\frac{1}{x^2}": ["x^{-2}"],
    r"\sqrt{x}": ["x^{1/2}"],
    "e^{-x}": [r"\frac{1}{e^x}"],
    r"e^{i\pi}": ["-1"],
    r"\cos 60^\circ": [r"\frac12"],
    r"\frac12": [r"\cos 60^\circ"],
    "(1,2),(3,4)": ["(3,4),(1,2)"],
    r"\{(1,2),(3,4)\}": ["(1,2),(3,4)"],
    r"(1,2)\text{ and }(3,4)": ["(1,2), (3,4)"],
    r"\text{Alice}": ["Alice"],
    r"\text{B}": ["B."],
    "p - q": ["-q+p"],
    "0.5": [".5", "1/2"],
    ".25": ["0.250"],
    "3.00": ["3"],
    r"\text{three}": ["three"],
    "100": [r"100\%"],
    r"100\%": ["1"],
    r"\frac{3}{2}": ["1.5", r"1 \frac{1}{2}"],
    "a=2, b=3": ["a = 2, b = 3", "b=3, a=2"],
    r"\frac{9}{\sqrt{3}}": [r"3\sqrt{3}"],
    r"\langle 1,2,3 \rangle": ["(1,2,3)"],
    r"\mathbf{i}+2\mathbf{j}": [r"\mathbf{i} + 2\mathbf{j}"],
    r"y=\frac{1}{2}x": [r"y=\frac{x}{2}"],
    "y = 3": ["y=3"],
    r"\text{2 hours}": ["2"],
    r"15 \text{ mph}": ["15 miles per hour", "15"],
}

# Hedges, near misses, and texts that a lenient reader takes for the answer.
WRONG = {
    # Ramanujan's constant differs from the integer in its 31st digit.
    "262537412640768744": [r"e^{\pi\sqrt{163}}"],
    "1,234": ["1, 234", "1234, 1", "1.234", "12,34"],
    "0.3": [r"0.3\%", r"3\%"],
    "17": ["17 kg apples", "17 = 17x", "x = y", "18 = x"],
    "42": [
        "42 or 43",
        r"\neq 42",
        "42!",
        r"\pm 42",
        "(41,43)",
        "[42,42]",
        "x>42",
        "42, 43",
        r"42 \text{ or } 43",
        r"\{42,43\}",
        "not 42",
        "~42",
        r"\approx 42",
        "42 million",
        "42 dozen",
        "6*7",
        "40+2",
        "4 2",
        "42x",
        "42?",
        r"42 \pm 0",
        "42=43",
        "43=42",
        "-42",
        "--42",
        "4^2",
        "42_8",
        "42 + C",
        r"42\text{ if }x>0",
        r"\max(42,43)",
        r"\text{forty-two}",
        "42/0",
        r"42 \approx 43",
        r"42 \vee 43",
        r"\infty",
        r"x \in (41,43)",
        r"x \le 42",
        r"42\%\%",
        r"\text{not }42",
        r"42 \text{ is wrong}",
        "9**9**9",
        "42 (or 43)",
        r"42, \text{but maybe } 43",
        "43 or 42",
        "42 and 43",
        "42/43",
        "either 42 or 43",
        "42; 43",
        r"\ne 42",
        "≠ 42",
        "!= 42",
        r"x \neq 42",
        "42!!",
        r"\mp 42",
        "±42",
        "> 42",
        r"\geq 42",
        r"\ge 42",
        r"x \ge 42",
        "x > 41",
        "41 < x < 43",
        "42 < x",
        "(41, 43)",
        "[41, 43]",
        "[42, 42]",
        r"\{41,42,43\}",
        r"42 \cup 43",
        r"42\text{ and }43",
        r"\sim 42",
        "about 42",
        "approximately 42",
        r"\text{about }42",
        r"42 \text{ approximately}",
        r"42 \text{ or so}",
        r"42 \text{ (maybe)}",
        "42...",
        r"42\ldots",
        r"42 + \epsilon",
        "42 + 0",
        r"42 \cdot 1",
        r"6 \times 7",
        "84 - 42",
        "40 + 2",
        "21 + 21",
        "42 m",
        "42^1x",
        "42_{10}x",
        "42_7",
        "4,2",
        "4.2",
        "42e0",
        "42^2",
        "1/42",
        "42 = 43",
        "x = 42 = 43",
        "x = 42, y = 43",
        "x = 43",
        "2x = 84",
        "x^2 = 1764",
        "x + y = 42 + z",
        r"42 \text{ million}",
        r"42 \text{ thousand}",
        "42 hundred",
        r"42 \text{ is not the answer}",
        r"\text{not } 42",
        r"\neg 42",
        r"42 \lor 43",
        r"42 \land 43",
        r"\min(42, 43)",
        r"\max(41, 42)",
        r"\gcd(42, 84)",
        r"\text{the answer}",
        r"\text{forty two}",
        "x",
        "n",
        "answer",
        r"\emptyset",
        r"\mathbb{R}",
        r"\begin{pmatrix} 42 \end{pmatrix} x",
        r"42 \mod 43",
        r"42 \pmod{43}",
        r"42 \equiv 0",
        r"\sqrt{42}",
        r"42\sqrt{1}x",
        r"\frac{42}{43}",
        r"42\frac{1}{2}",
        "42 1/2",
        "42 : 1",
        "42:43",
        "42%%",
        "42'",
        "0042.1",
        r"43 \approx 42",
        r"42 \approx 42.4",
        r"42 \to 43",
        r"42 \Rightarrow 43",
        r"42 \implies 42",
        "[42",
        "42)",
        r"\{42",
        "(42, )",
        ",42,43",
        r"42 \\ 43",
        "42 & 43",
        "42 | 43",
        "|42 - 84|",
        r"42 \text{ or } x",
        "any number",
        r"\text{all real numbers}",
        "42^{42}",
        "9^{9^{9}}",
        r"42 \text{ cm} \text{ or } 42 \text{ kg}",
        r"42 \text{ apples or oranges}",
        r"42 \text{ wrong}",
        r"\underline{42} 43",
        r"\cancel{43} 42",
        r"\phantom{42}",
        r"\text{42 or 43}",
        r"\boxed{42} \boxed{43}",
        r"4\boxed{2}",
        r"\frac{42}",
        r"\sqrt{}",
        "__import__('os')",
        "",
    ],
    r"5 \text{ cm}": [r"5 \text{ m}", "5 kg"],
    r"\frac13": ["0.333", "0.33333333", "0.33", "0.333333333", r"\frac{1}{3.01}"],
    "(3,4]": ["(3,4)", "[3,4]"],
    "(1,2)": ["(2,1)", "1", "[1,2]"],
    "x=5": ["y=5", "2x=10"],
    "5": ["2x=10"],
    r"\text{east}": ["west", "seat"],
    r"\text{(C)}": ["(D)", "C or D", "(C) (D)"],
    r"\sqrt{x^2}": ["x"],
    "|x|": ["x"],
    "x^2+1": ["x^2+2", "x^2-1", "y^2+1", "x^2", "x^2+1=0", r"x^2+1 \text{ or } x^2+2", "X^2+1"],
    "2R": ["2r"],
    "52_8": ["52", "52_9", "42"],
    "2,3": ["2", "2,3,4", r"2 \text{ to } 3"],
    "y=2x+3": ["y=2x+4", "x=2y+3"],
    r"10\pi": ["31.4159"],
    r"\pi": ["3.14", r"\frac{22}{7}", "3.14159265"],
    r"\infty": [r"-\infty", "1000000"],
    "1,-2": ["1,2"],
    r"(2,\infty)": [r"x \ge 2", "x<2"],
    "2^{4181}": ["2^{4181}+1"],
    "LQSX": ["XSQL"],
    r"5\text{ cm}": [r"5\text{ m}", r"5\text{ kg}", r"5\text{ cm}^2"],
    r"5\text{ cm}^2": [r"5\text{ cm}"],
    r"20\text{ miles}": ["20 km", "20 hours"],
    r"\$5": ["5 cents"],
    r"5.4\text{ cents}": [r"\$5.4"],
    r"20\%": [r"20^\circ", "0.02", r"2\%"],
    "0.2": ["20"],
    r"\frac23": ["0.67"],
    r"\sqrt2": ["1.414", "1.41421356"],
    "e": ["2.718"],
    r"\frac{\pi}{6}": ["0.5236"],
    r"2\sqrt3": [r"3\sqrt2", r"\sqrt{6}"],
    r"2\sqrt{3}": [r"2\sqrt{3}, -2\sqrt{3}", r"\pm 2\sqrt{3}"],
    "(2,3)": [
        "(3,2)",
        "[2,3]",
        "(2,3]",
        "2,3",
        r"\{2,3\}",
        "(2,3,0)",
        "(2)",
        "x=3, y=2",
        r"(2,3) \text{ or } (3,2)",
        "(2,4)",
    ],
    "[2,3]": ["(2,3)"],
    "[2,3)": [r"2 \le x \le 3", "2 < x < 3"],
    r"(-\infty,3)": ["x > 3", r"x \le 3", r"(3,-\infty)", r"(-\infty,3]", "3"],
    r"(-\infty,-1)\cup(1,\infty)": [
        r"(-\infty,-1)",
        r"(-\infty,-1] \cup [1,\infty)",
        r"(-\infty,\infty)",
        "-1 < x < 1",
        r"(-\infty,-1)\cap(1,\infty)",
    ],
    r"\{1,2,3\}": [r"\{1,2\}", r"\{1,2,3,4\}", r"\{1,2,4\}", "(1,2,3)"],
    "1,2": ["1", "2", "1,2,3", "1,3", "1,1"],
    "1,-1": ["1"],
    r"\pm 2": ["2", "-2"],
    "2": [r"\pm 2"],
    "x=3": ["y=3", "x=4", r"x \ne 3", r"x \ge 3", "3x=9", "x=3, x=4", r"x=3 \text{ or } 4"],
    "y=2x+1": ["y=2x-1", "x=2y+1", "y=x", "y", "2x+1=0", "y>2x+1"],
    "x=3,y=4": ["x=4,y=3", "4,3"],
    "x^2+y^2=4": ["x^2+y^2=2", "x+y=2"],
    "5x-7y+4=0": ["5x-7y-4=0", "0=0", "5x-7y"],
    r"\begin{pmatrix}1&2\\3&4\end{pmatrix}": [
        r"\begin{pmatrix}1&3\\2&4\end{pmatrix}",
        r"\begin{pmatrix}1&2\\3&5\end{pmatrix}",
        r"\begin{vmatrix}1&2\\3&4\end{vmatrix}",
    ],
    r"\begin{pmatrix}1\\2\end{pmatrix}": [
        r"\begin{pmatrix}1&2\end{pmatrix}",
        r"\begin{pmatrix}2\\1\end{pmatrix}",
        r"\begin{pmatrix}1\\2\end{pmatrix}^{-1}",
        r"\begin{pmatrix}1\\2\end{pmatrix} \text{ or } \begin{pmatrix}2\\1\end{pmatrix}",
    ],
    r"30^\circ": [r"60^\circ", r"30 \text{ radians}", r"30\%", r"\frac{\pi}{3}"],
    "101_2": ["101", "101_3", "5", "110_2"],
    r"\text{(A)}": ["B", "A or B", "A, B", "(A) (B)", "AB", "not A", "A and B"],
    r"\text{Monday}": ["Tuesday", "Monday or Tuesday", "Monday, Tuesday", "not Monday"],
    r"\text{yes}": ["no", "yes or no"],
    r"\text{even}": ["odd", "not even"],
    "3+4i": ["3-4i", "7i", "3+4j"],
    r"\ln 2": [r"\log 2"],
    r"\sin x": [r"\cos x", r"\sin y", r"\sin(2x)"],
    r"\frac{x^2-1}{x-1}": ["x+2"],
    "120": ["5"],
    "5!": ["5"],
    "2^{100}": ["2^{101}"],
    "10^{50}": ["10^{50}+1"],
    "1234567890123456789": ["1234567890123456788"],
    "1000000": ["1{,}000{,}00"],
    "1:4": ["4:1", "1:5"],
    "a/b": ["b/a"],
    "a-b": ["b-a"],
    "x>3": ["x<3", r"x \ge 3", "y>3"],
    "1<x<3": ["1<x"],
    r"2\frac12": [r"2\cdot\frac12", "1", r"\frac{2}{12}"],
    "1.5": ["1,5"],
    r"\text{8:30}": ["8:31"],
    "x^3+C": ["x^3"],
    "p-q": ["q-p"],
}


# Written before they were tried.
RIGHT_AS_WELL = {
    r"\frac{3}{8}": [".375"],
    r"2\frac{2}{3}": [r"\frac{8}{3}"],
    r"-2\frac{2}{3}": [r"-\frac{8}{3}"],
    r"4\sqrt{2}+6": [r"6+4\sqrt2"],
    r"\frac{5\sqrt{3}}{3}": [r"\frac{5}{\sqrt{3}}"],
    r"\frac{2+\sqrt{3}}{4}": [r"\frac{1}{2}+\frac{\sqrt{3}}{4}"],
    r"\sqrt{50}": [r"5\sqrt{2}"],
    "3^{1/2}": [r"\sqrt{3}"],
    r"\pi r^2": [r"r^2\pi"],
    r"\frac{4}{3}\pi r^3": [r"\frac{4\pi r^3}{3}"],
    "x^2-4": ["(x+2)(x-2)"],
    r"\frac{1}{x}-\frac{1}{y}": [r"\frac{y-x}{xy}"],
    r"\ln\frac{3}{2}": [r"\ln 3-\ln 2"],
    "e^{2x}": ["(e^x)^2"],
    r"\sin(2x)": [r"2\sin x\cos x"],
    r"\sec^2 x": [r"\frac{1}{\cos^2 x}"],
    r"\tan^{-1} 2": [r"\arctan(2)"],
    r"(0,\infty)": ["x>0", r"\{x | x>0\}"],
    "[0,1]": [r"0\leq x\leq1", "[0, 1.0]"],
    r"(-\infty,\frac{1}{2}]": [r"x \le 0.5"],
    "[-2,2]": [r"-2 \le t \le 2", r"x \in [-2, 2]"],
    r"\left[-2,2\right]": ["[-2,2]"],
    r"(1,\infty)": [r"\left(1, +\infty\right)"],
    r"\{-1,1\}": [r"\{1,-1\}", "x = -1, 1", r"x = 1 \text{ or } x = -1", r"x=\pm1"],
    "3, -2": ["x = 3, x = -2", r"3 \text{ and } -2"],
    "(3,-2)": ["x = 3, y = -2", r"\left(3,-2\right)", "(x,y) = (3,-2)"],
    "(a,b)=(3,-2)": ["(3,-2)"],
    r"\begin{pmatrix} 0.5 \\ 1 \end{pmatrix}": [r"\begin{bmatrix} \frac{1}{2} \\ 1 \end{bmatrix}"],
    "x^2 + 3x": ["f(x) = x^2 + 3x"],
    "f(x)=x^2+3x": ["x^2+3x"],
    r"y = -\frac{1}{2}x+4": [r"y = 4 - \frac{x}{2}", "x + 2y = 8"],
    "x + 2y = 8": ["2y + x - 8 = 0"],
    "(x-1)^2+(y-2)^2=9": ["x^2+y^2-2x-4y-4=0"],
    r"25\%": ["0.25", "25", r"\frac14"],
    "$12.50": [r"\$12.5"],
    r"\$1,200": ["1200", "1200 dollars"],
    "1,200": ["1200"],
    "12,345,678": ["12345678"],
    r"72^\circ": [r"72 \text{ degrees}", r"72\degree", r"\frac{2\pi}{5}"],
    r"\frac{2\pi}{5}": [r"72^\circ"],
    "110_2": ["110_{2}", r"110 \text{ base } 2"],
    "2A_{16}": ["2A_{16}"],
    r"\text{Tuesday}": [r"\text{Tuesday}", "tuesday"],
    r"\text{neither}": ["Neither"],
    r"\text{True}": ["true"],
    r"\text{increasing}": ["increasing"],
    "(D)": ["D"],
    "D": [r"\text{(D)}", r"\mathbf{D}"],
    r"10\text{ minutes}": ["10 min", "10 minutes"],
    "10": [r"10 \text{ minutes}"],
    r"36\pi \text{ cm}^3": [r"36\pi"],
    r"36\pi": [r"36\pi \text{ cubic units}", r"36 \pi\text{ cm}^3"],
    "6!": ["720"],
    "720": ["6!"],
    r"1.23 \times 10^{-4}": ["0.000123"],
    r"\frac{10}{4}": ["2.5"],
    "2.50": [r"\frac{5}{2}"],
    "0": ["0.0", r"\{0\}"],
    "-1": ["i^2"],
    "2i": ["0+2i"],
    r"\frac{1+i}{2}": [r"\frac{1}{2}+\frac{1}{2}i"],
    "3:2": ["3:2"],
    r"x\geq 2": [r"x \ge 2", r"[2,\infty)", r"2 \le x"],
    r"x \neq 1": [r"(-\infty,1)\cup(1,\infty)"],
    "-3 < x < 5": ["(-3,5)"],
    r"\infty": [r"+\infty"],
    r"\text{undefined}": ["undefined"],
    "2^{10}": ["1024"],
    r"\log_3 5": [r"\frac{\ln 5}{\ln 3}"],
    "n^2+n": ["n(n+1)"],
    "a^{m+n}": ["a^m a^n"],
    r"\sqrt{xy}": [r"\sqrt{x}\sqrt{y}"],
    r"5\sqrt[3]{2}": [r"5 \cdot 2^{1/3}"],
    r"\frac{x}{2}+C": ["0.5x + C"],
    "13": [r"\text{13}", r"13 \, \text{units}"],
    "1000": ["10^3"],
    r"120^\circ": [r"120\text{°}"],
    r"\frac{a+b}{c}": ["(a+b)/c"],
    r"x=\frac{-1\pm\sqrt{5}}{2}": [r"\frac{-1+\sqrt5}{2}, \frac{-1-\sqrt5}{2}"],
    r"\frac{-1\pm\sqrt{5}}{2}": [
        r"x = \frac{-1 \pm \sqrt{5}}{2}",
        r"-\frac12 \pm \frac{\sqrt5}{2}",
    ],
    "x=2": ["2"],
    "x = 2, 3": ["2, 3"],
    r"\lfloor x \rfloor": [r"\lfloor x\rfloor"],
    "10^{-3}": ["0.001"],
    r"\text{3 apples}": ["3"],
    r"\text{30 minutes}": ["30"],
    r"\overrightarrow{AB}": [r"\overrightarrow{AB}"],
    r"\triangle ABC": [r"\triangle ABC"],
    r"\frac{\sqrt{6}-\sqrt{2}}{4}": [r"\sin 15^\circ"],
    r"\cos\frac{\pi}{5}": [r"\frac{1+\sqrt5}{4}"],
    "(1,2,3)": ["(1, 2, 3)"],
    r"\mathbb{Z}": [r"\mathbb{Z}"],
    r"\{0\}": ["0"],
    r"k\pi": [r"\pi k"],
    r"\frac{\pi}{2}+k\pi": [r"k\pi + \frac{\pi}{2}"],
    "2x^2y": ["2yx^2"],
    r"4 \text{ and } 5": ["4,5"],
    r"4, 5 \text{ and } 6": ["6, 5, 4"],
    r"50\text{ mph}": ["50 mph"],
    "5'": ["5'"],
}
WRONG_AS_WELL = {
    r"\frac{3}{8}": [r"\frac{8}{3}", "0.38"],
    r"2\frac{2}{3}": [r"\frac{4}{3}"],
    r"4\sqrt2": [r"4\sqrt{2} \text{ or } -4\sqrt{2}"],
    r"\sqrt{50}": ["50"],
    "x^2-4": ["x^2-4=0", "(x-2)^2"],
    r"(0,\infty)": [r"[0,\infty)", r"x \neq 0"],
    "[0,1]": ["[0,1)", r"\{0,1\}", "0,1", r"(0,1) \cup \{0\}"],
    r"\{-1,1\}": [r"\{-1,0,1\}", "[-1,1]", "1"],
    "3, -2": [r"3 \text{ or } 2"],
    "(3,-2)": ["(-2,3)"],
    "y = 2x": ["y = 2x + c", r"y \approx 2x", "x = 2y"],
    r"25\%": [r"25 \text{ or } 75\%", r"0.25\%"],
    r"72^\circ": [r"72 \text{ radians}", r"0.2^\circ"],
    "110_2": ["6", "110_8"],
    r"\text{Tuesday}": [r"\text{Tuesday or Wednesday}"],
    "(D)": ["(D) or (E)"],
    "D": ["E", r"\text{D or E}"],
    r"10\text{ minutes}": ["10 seconds", "10 hours"],
    "7": [
        r"7 \text{ or } 8",
        r"7 \text{ to } 8",
        "7-8",
        r"7\sim 8",
        "6 < x < 8",
        r"x = 7 \text{ or } x = -7",
        r"\{x | x = 7\} \cup \{8\}",
        r"7^{\pm 1}",
        "+-7",
        "7 (mod 10)",
        r"\text{at least } 7",
        r"\text{at most } 7",
        r"\ge 7",
        r"\leq 7",
        "7^+",
        "7+",
        r"7\text{-ish}",
        r"7 \text{ probably}",
        r"\text{maybe } 7",
        r"7 \vert 8",
        r"7 \oplus 0",
        r"7 \% 8",
        "7, 7.5",
        r"\frac{7}{8}",
        "7:8",
        "{7, 8}",
        r"\begin{cases} 7 \\ 8 \end{cases}",
        r"\begin{matrix} 7 & 8 \end{matrix}",
        "[7]_8",
        "7_{8}",
        r"\sqrt{7}",
        "-(-7)+x",
        "7x^0 y",
        "x^{7}",
        r"\text{seven or eight}",
        r"\therefore 8",
        r"7 \nleq 8",
        r"\not= 7",
        r"\not 7",
        r"\lnot 7",
        "!7",
        "7 = 8",
        "8 = 7",
        "x = 8 = 7",
        "x = 7 + 1",
        r"7 \ne 8",
        "7 < 8",
    ],
    "1,2": [r"1 \text{ or } 3", "12", "1.2", r"\{1,2,3\}"],
    "1.2": ["1,2"],
    "x=2": [r"x=2 \text{ or } x=3", r"x \in \{2,3\}", "x>2"],
    "2^{10}": ["2^{11}"],
    "2i": ["2", "-2i"],
    r"\pi": ["3", r"\frac{355}{113}"],
    r"\frac{\pi}{2}": ["90"],
    r"\log_3 5": [r"\log_5 3"],
    r"\text{True}": ["False"],
    r"\text{increasing}": ["decreasing", "not increasing"],
    r"\text{undefined}": ["0"],
    "0": [r"\text{undefined}", r"\emptyset", "x=0 or 1", "x+y=0", "x^2=0"],
    "n^2+n": ["n^2-n"],
    r"\frac{x}{2}+C": [r"\frac{x}{2}"],
}


def cases(*tables):
    return [(t, said) for table in tables for t, answers in table.items() for said in answers]


def test_the_pages_give_the_number_of_cases():
    tables = (RIGHT, RIGHT_AS_WELL, WRONG, WRONG_AS_WELL, SCIENTIFIC_RIGHT, SCIENTIFIC_WRONG)
    pairs = sum(map(len, [*EQUAL.values(), *UNEQUAL.values()]))
    for page in ("rewards", "answer_reader"):
        text = (pathlib.Path(__file__).parents[2] / "docs" / f"{page}.md").read_text()
        assert f"{len(cases(*tables)) + pairs:,} labelled cases" in text


@pytest.mark.parametrize(("truth", "said"), cases(RIGHT_AS_WELL))
def test_further_spellings(truth, said):
    assert equal(truth, said)


@pytest.mark.parametrize(("truth", "said"), cases(WRONG_AS_WELL))
def test_further_answers_that_are_wrong(truth, said):
    assert not equal(truth, said)


@pytest.mark.parametrize("truth", RIGHT)
def test_the_same_answer_in_other_spellings(truth):
    assert [said for said in RIGHT[truth] if not equal(truth, said)] == []


@pytest.mark.parametrize("truth", WRONG)
def test_what_is_not_the_answer(truth):
    assert [said for said in WRONG[truth] if equal(truth, said)] == []


@pytest.mark.parametrize("truth", RIGHT)
def test_every_truth_is_itself(truth):
    for said in (truth, f"${truth}$", rf"\boxed{{{truth}}}"):
        assert equal(truth, said)


@given(st.integers(-9999, 9999), st.integers(1, 99), st.integers(-9999, 9999), st.integers(1, 99))
def test_fractions_are_equal_where_their_values_are(a, b, c, d):
    for said in (rf"\frac{{{c}}}{{{d}}}", f"{c}/{d}", rf"x = {c}/{d}", rf"\dfrac{{{c}}}{{{d}}}"):
        assert equal(rf"\frac{{{a}}}{{{b}}}", said) == (a * d == c * b)


SCIENTIFIC_RIGHT = {
    "1500": ["1.5e3", "1.5E3", "1.5e+3", r"1.5e3 \text{ cm}", "x = 1.5e3", "3e3/2"],
    "0.0025": ["2.5e-3", "2.5e-03"],
    "1.5e3": ["1500", r"1.5 \times 10^3"],
    r"\$2,000,000": [r"\$2e6"],
    "2e-1": ["2e - 1", "-1+2e"],
    "2e^3": ["2 e^3"],
    "42": [r"\ 42\ ", r"\, 42\;", r"\quad 42", r"\hspace{2mm} 42", r"\boxed {\ 42 }"],
}
SCIENTIFIC_WRONG = {
    "0.2": ["2e-1"],
    "1500": ["15e2", "1.5e", "1.5e^3", "1.5e3x", "x1.5e3", "1.5e3!", "1,5e3", "1.5e3 or 2e3"],
    "2000": ["2e^3", "2e3.5", "12e3", "2 e3"],
    "e": ["1e1", "1e0"],
    "42": [r"4\ 2", r"4\quad 2", r"\boxed{~42}", r"42\\ 43"],
}


@pytest.mark.parametrize(("truth", "said"), cases(SCIENTIFIC_RIGHT))
def test_scientific_notation_and_space_around_an_answer(truth, said):
    assert equal(truth, said)


@pytest.mark.parametrize(("truth", "said"), cases(SCIENTIFIC_WRONG))
def test_what_only_looks_like_scientific_notation_or_space(truth, said):
    assert not equal(truth, said)


COMMANDS = r"\frac,\sqrt,\text{,\boxed{,\pm,\cup,\le,\infty,\begin{pmatrix},\\,\degree,\{,\}"
PIECES = (
    st.sampled_from(COMMANDS.split(","))
    | st.sampled_from("{}()[]|,;:=<>+-*/^_!%'$ \u00b1e")
    | st.sampled_from(["42", "1", "0.5", "x", "or", "and", "not", "cm", "pi"])
)


@given(st.lists(PIECES | st.text(max_size=3), max_size=12).map("".join))
def test_any_text_is_read_or_refused(text):
    with contextlib.suppress(Unreadable):
        read_answer(text)
    equal("42", text)
    equal(text, "42")


SAID_AS_WELL = (
    st.sampled_from(
        [
            " or 43",
            ", 43",
            r"\text{ or } 43",
            " and 43",
            "; 43",
            "!",
            "?",
            r" \text{ (or } 43)",
            "x",
        ]
    )
    | st.sampled_from(
        [r" \lor 43", r"\ldots", " = 43", " + 1", r"^{2}", r" \ne 42", r" \text{ is wrong}", "/0"]
    )
    | st.sampled_from([r" \cup \{43\}", r"_{7}", r" \pm 1", " million"])
)


@given(st.integers(2, 10**6), SAID_AS_WELL)
def test_what_is_said_beside_the_answer_makes_it_another(number, more):
    if number not in (43, 42):
        assert not equal(str(number), f"{number}{more}")


SAID_BEFORE = st.sampled_from(
    [r"\ne ", r"\neq ", "not ", r"\pm ", r"\approx ", "> ", r"\ge ", "43 or ", "-", "~"]
)


@given(st.integers(2, 10**6), SAID_BEFORE)
def test_what_is_said_before_the_answer_makes_it_another(number, more):
    assert not equal(str(number), f"{more}{number}")


# Both orders of a pair


@pytest.mark.parametrize("kind", EQUAL)
def test_equal_pairs_in_both_orders(kind):
    pairs = [pair for one, other in EQUAL[kind] for pair in ((one, other), (other, one))]
    assert [pair for pair in pairs if not equal(*pair)] == []
    assert all(equal(x, x) for pair in pairs for x in pair)


@pytest.mark.parametrize("kind", UNEQUAL)
def test_unequal_pairs_in_both_orders(kind):
    pairs = [pair for one, other in UNEQUAL[kind] for pair in ((one, other), (other, one))]
    assert [pair for pair in pairs if equal(*pair)] == []


def test_the_order_of_the_cases_above_does_not_matter():
    tables = (RIGHT, RIGHT_AS_WELL, WRONG, WRONG_AS_WELL, SCIENTIFIC_RIGHT, SCIENTIFIC_WRONG)
    assert [pair for pair in cases(*tables) if equal(*pair) != equal(*pair[::-1])] == []


NUMERALS = st.one_of(
    st.integers(-12, 12).map(str),
    st.sampled_from(["0.5", "1.25", "1,234", "1234", "3 x 10^2", "300", r"10^{3}", "0.3", "-7.0"]),
    st.tuples(st.integers(-5, 5), st.integers(1, 4)).map(lambda t: rf"\frac{{{t[0]}}}{{{t[1]}}}"),
    st.tuples(st.integers(-5, 5), st.integers(1, 4)).map(lambda t: rf"{{{t[0]} \over {t[1]}}}"),
    st.sampled_from(
        [r"\sqrt{2}", r"\sqrt[3]{8}", r"\pi", "2i", r"\sum_{k=1}^{3} k", "6*7", "40+2"]
    ),
)
EXPRESSIONS = st.one_of(
    NUMERALS,
    st.sampled_from(
        ["x", "2x+1", "x^2", "(x-1)(x+1)", "ab", "yes", "Yes", "AB", r"\text{even}", "C"]
    ),
    st.tuples(NUMERALS, st.sampled_from("+-*")).map(lambda t: f"x {t[1]} {t[0]}"),
    st.tuples(NUMERALS, NUMERALS).map(lambda t: rf"{t[0]} \pm {t[1]}"),
)
WITH_UNITS = st.tuples(
    NUMERALS,
    st.sampled_from(
        [
            "",
            "%",
            r"\%",
            r"^\circ",
            " cm",
            r"\text{ cm}^2",
            " m/s",
            r"\text{ apples}",
            " 米",
            " kg apples",
        ]
    ),
).map("".join)
SETS = st.tuples(
    st.sampled_from("([]"), NUMERALS, st.sampled_from(",;"), NUMERALS, st.sampled_from(")[]")
).map("".join)
ITEMS = EXPRESSIONS | WITH_UNITS | SETS
ANSWERS = st.one_of(
    ITEMS,
    st.lists(ITEMS, min_size=2, max_size=3).map(", ".join),
    st.lists(ITEMS, min_size=2, max_size=3).map(r" \text{ or } ".join),
    st.lists(ITEMS, min_size=1, max_size=3).map(lambda x: r"\{" + ", ".join(x) + r"\}"),
    st.lists(SETS, min_size=2, max_size=2).map(r" \cup ".join),
    st.tuples(
        st.sampled_from(["x", "y", "x+y", "a+b", "AB", "f(x)", "2", "84/2"]),
        st.sampled_from(["=", "=", "<", r"\le", r"\approx", r"\in", r"\ne"]),
        ITEMS,
    ).map(" ".join),
    st.tuples(ITEMS, st.sampled_from(["= x", "= y", "= 2", "< x", r"\approx 0.33"])).map(" ".join),
    st.tuples(NUMERALS, NUMERALS).map(" : ".join),
)


@given(ANSWERS, ANSWERS)
def test_equality_is_symmetric_and_reflexive(one, other):
    assert equal(one, one) and equal(other, other)
    assert equal(one, other) == equal(other, one)


@given(
    ANSWERS, st.sampled_from(["$~$", r"\boxed{~}", "**~**", "x = ~", "~ cm", "-~", "(~)", "~, 1"])
)
def test_equality_is_symmetric_for_answers_that_are_alike(answer, dress):
    other = dress.replace("~", answer)
    assert equal(answer, other) == equal(other, answer)


@pytest.mark.parametrize("name", ["math500", "math_train"])
def test_equality_of_the_data_sets_answers_is_symmetric_and_reflexive(name):
    path = DATA / f"{name}.jsonl"
    if not path.exists():
        pytest.skip(f"{path} is not here")
    with path.open(encoding="utf-8") as lines:
        answers = [x for x in (str(json.loads(line)["answer"]) for line in lines) if x.strip()]
    for one, other in zip(answers, [*answers[1:], answers[0]], strict=True):
        assert equal(one, one)
        assert equal(one, other) == equal(other, one)
