"""Pairs of questions: lookalikes that differ in meaning, and paraphrases that do not.

Two sets of templates with values of their own: `tuning`, on which the guard's checks and lexicon
were worked out, and `report`, from which the figures are. The report set was written before the
guard was run on any of it, by the same author, who knew the guard's design. Nothing was changed in
the guard because of a pair in it.

A template is `(kind, donor, prompt)` with slots in braces; of one template many pairs are made, so
pairs of one template are no independent samples.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

Set = Literal["tuning", "report"]
LOOKALIKES = (
    "negation",
    "number",
    "unit",
    "date",
    "entity swap",
    "role swap",
    "antonym",
    "temporal order",
)
PARAPHRASES = (
    "framing",
    "synonym",
    "reordering",
    "voice",
    "contraction",
    "number spelled out",
    "unit",
    "date format",
    "wording",
)


@dataclass(frozen=True)
class Pair:
    """Two questions.

    Attributes:
        kind: of `LOOKALIKES` or `PARAPHRASES`.
        same: whether the donor's answer is right for the prompt.
    """

    kind: str
    donor: str
    prompt: str
    same: bool


def pairs(which: Set, same: bool, count: int, seed: int) -> list[Pair]:
    """`count` different pairs, the kinds as even as the templates allow.

    Raises:
        ValueError: the templates do not make that many.
    """
    rng = random.Random(f"{which} {same} {seed}")
    templates = (_PARAPHRASES if same else _LOOKALIKES)[which]
    kinds = {kind: [t for t in templates if t[0] == kind] for kind, _, _ in templates}
    made: dict[tuple[str, str], Pair] = {}
    for attempt in range(50 * count):
        kind = list(kinds)[attempt % len(kinds)]
        _, donor, prompt = kinds[kind][attempt // len(kinds) % len(kinds[kind])]
        values = _values(which, rng)
        pair = Pair(kind, donor.format(**values), prompt.format(**values), same)
        if pair.donor != pair.prompt:  # "May" is its own short form
            made.setdefault((pair.donor, pair.prompt), pair)
        if len(made) == count:
            return list(made.values())
    raise ValueError(f"the templates of {which} make only {len(made)} pairs, not {count}")


_WORDS = [
    "zero",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
]
_MONTHS = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
]

_PEOPLE = {
    "tuning": ["Anna", "Boris", "Clara", "David", "Elena", "Felix", "Greta", "Hugo", "Ines"],
    "report": [
        "Martha",
        "Nils",
        "Olga",
        "Pedro",
        "Quentin",
        "Rosa",
        "Stefan",
        "Tara",
        "Umar",
        "Vera",
    ],
}
_CITIES = {
    "tuning": ["Paris", "Oslo", "Madrid", "Vienna", "Dublin", "Athens", "Lisbon"],
    "report": [
        "Berlin",
        "Tokyo",
        "Nairobi",
        "Chicago",
        "Mumbai",
        "Warsaw",
        "Prague",
        "Toronto",
        "Lima",
    ],
}
_COUNTRIES = {
    "tuning": ["France", "Norway", "Spain", "Austria", "Ireland", "Greece"],
    "report": ["Germany", "Japan", "Kenya", "Canada", "India", "Poland", "Peru", "Egypt", "Brazil"],
}
_FOODS = {
    "tuning": ["tea", "rice", "butter", "salmon", "garlic", "honey"],
    "report": ["coffee", "pasta", "cheese", "chicken", "spinach", "yogurt", "chocolate", "almonds"],
}
_THINGS = {
    "tuning": ["laptop", "bicycle", "camera", "washing machine"],
    "report": ["printer", "dishwasher", "phone", "heat pump", "router", "drill", "tablet"],
}
_ANIMALS = {
    "tuning": ["dogs", "horses", "owls", "frogs"],
    "report": ["cats", "rabbits", "bees", "sharks", "goats", "parrots", "snakes"],
}
_DRUGS = {
    "tuning": ["aspirin", "insulin"],
    "report": ["ibuprofen", "paracetamol", "amoxicillin", "metformin", "codeine"],
}


def _values(which: Set, rng: random.Random) -> dict[str, str]:
    p, q = rng.sample(_PEOPLE[which], 2)
    a, b = rng.sample(_CITIES[which], 2)
    c, d = rng.sample(_COUNTRIES[which], 2)
    f, g = rng.sample(_FOODS[which], 2)
    t, u = rng.sample(_THINGS[which], 2)
    x, y = rng.sample(_ANIMALS[which], 2)
    n, m = rng.sample(range(2, 13), 2)
    year, year2 = rng.sample(range(1951, 2020), 2)
    month, month2 = rng.sample(range(12), 2)
    day, day2 = rng.sample(range(1, 29), 2)
    return {
        "p": p, "q": q, "a": a, "b": b, "c": c, "d": d, "f": f, "g": g, "t": t, "u": u, "x": x, "y": y,
        "drug": rng.choice(_DRUGS[which]),
        "n": str(n), "m": str(m), "nw": _WORDS[n], "mw": _WORDS[m],
        "n000": f"{n},000", "n00": str(100 * n), "n60": str(60 * n),
        "year": str(year), "year2": str(year2), "month": _MONTHS[month], "month2": _MONTHS[month2],
        "mon": _MONTHS[month][:3], "day": str(day), "day2": str(day2),
        "iso": f"{year}-{month + 1:02}-{day:02}", "hour": str(n % 11 + 1), "hour24": str(n % 11 + 13),
    }  # fmt: skip


_Templates = list[tuple[str, str, str]]

_LOOKALIKES: dict[Set, _Templates] = {
    "tuning": [
        (
            "negation",
            "Is it safe to store {f} in the {t}?",
            "Is it not safe to store {f} in the {t}?",
        ),
        ("negation", "Which {x} can swim?", "Which {x} can't swim?"),
        ("negation", "Why does the {t} start?", "Why does the {t} never start?"),
        ("negation", "Can you cook {f} with salt?", "Can you cook {f} without salt?"),
        ("number", "How do I cook {f} for {n} people?", "How do I cook {f} for {m} people?"),
        ("number", "What is {n} percent of 300?", "What is {m} percent of 300?"),
        ("number", "Is the {t} version {n}.1 stable?", "Is the {t} version {n}.10 stable?"),
        ("unit", "How long is a run of {n} km?", "How long is a run of {n} miles?"),
        ("unit", "Bake the {f} for {n} minutes?", "Bake the {f} for {n} hours?"),
        ("unit", "Is {n} kg of {f} too much?", "Is {n} pounds of {f} too much?"),
        (
            "date",
            "What happened on {month} {day}, {year}?",
            "What happened on {month} {day}, {year2}?",
        ),
        ("date", "What did {p} do in {month} {year}?", "What did {p} do in {month2} {year}?"),
        ("date", "Who led {c} in {year}?", "Who led {c} in {year2}?"),
        ("entity swap", "What is the capital of {c}?", "What is the capital of {d}?"),
        ("entity swap", "Is {f} good for the heart?", "Is {g} good for the heart?"),
        ("entity swap", "How old is {p}?", "How old is {q}?"),
        ("role swap", "Did {p} beat {q}?", "Did {q} beat {p}?"),
        ("role swap", "When is the train from {a} to {b}?", "When is the train from {b} to {a}?"),
        ("role swap", "Was {p} hired by {q}?", "Was {q} hired by {p}?"),
        ("role swap", "Is {c} larger than {d}?", "Is {d} larger than {c}?"),
        ("role swap", "Do {x} eat {y}?", "Do {y} eat {x}?"),
        ("antonym", "What is the highest point of {c}?", "What is the lowest point of {c}?"),
        ("antonym", "How do I lock the {t}?", "How do I unlock the {t}?"),
        ("antonym", "Is {f} expensive in {a}?", "Is {f} cheap in {a}?"),
        (
            "temporal order",
            "Should I take {drug} before eating {f}?",
            "Should I take {drug} after eating {f}?",
        ),
        ("temporal order", "Who was the first mayor of {a}?", "Who was the last mayor of {a}?"),
        ("temporal order", "Did {p} arrive before {q}?", "Did {q} arrive before {p}?"),
    ],
    "report": [
        (
            "negation",
            "Is {drug} recommended during pregnancy?",
            "Is {drug} not recommended during pregnancy?",
        ),
        ("negation", "Which rooms have no window?", "Which rooms have a window?"),
        (
            "negation",
            "Why did {p} sign the contract with {q}?",
            "Why didn't {p} sign the contract with {q}?",
        ),
        (
            "negation",
            "What happens if the {t} is connected to the mains?",
            "What happens if the {t} isn't connected to the mains?",
        ),
        (
            "negation",
            "Which citizens of {c} need a visa for {d}?",
            "Which citizens of {c} don't need a visa for {d}?",
        ),
        (
            "negation",
            "Does the warranty of the {t} cover water damage?",
            "Does the warranty of the {t} never cover water damage?",
        ),
        ("negation", "Can {x} survive with {f}?", "Can {x} survive without {f}?"),
        ("negation", "Has {p} ever been to {a}?", "Has {p} never been to {a}?"),
        ("negation", "List foods that contain {f}", "List foods that do not contain {f}"),
        (
            "negation",
            "What should I do when the {t} boots?",
            "What should I do when the {t} fails to boot?",
        ),
        (
            "negation",
            "Explain why {x} are considered social",
            "Explain why {x} are not considered social",
        ),
        ("negation", "Are guests in {a} allowed to smoke?", "Are guests in {a} unable to smoke?"),
        (
            "number",
            "Can {n} guests stay in one apartment in {a}?",
            "Can {m} guests stay in one apartment in {a}?",
        ),
        (
            "number",
            "What are the {n} most populous regions of {c}?",
            "What are the {m} most populous regions of {c}?",
        ),
        ("number", "Is {n} cups of {f} a day too much?", "Is {m} cups of {f} a day too much?"),
        (
            "number",
            "What does error {n}0{m} on my {t} mean?",
            "What does error {m}0{n} on my {t} mean?",
        ),
        (
            "number",
            "How much is a {n}% discount on 80 euros?",
            "How much is a {m}% discount on 80 euros?",
        ),
        (
            "number",
            "Which bus goes to the {n}th district of {a}?",
            "Which bus goes to the {m}th district of {a}?",
        ),
        (
            "number",
            "Does the {t} last more than {nw} years?",
            "Does the {t} last more than {mw} years?",
        ),
        (
            "number",
            "Is chapter {n} about {x} hard to read?",
            "Is chapter {m} about {x} hard to read?",
        ),
        ("number", "Give me {n} facts about {x}", "Give me {m} facts about {x}"),
        ("number", "Do all {x} sleep during the day?", "Do some {x} sleep during the day?"),
        (
            "number",
            "Must at least {n} people from {c} attend?",
            "Must at most {n} people from {c} attend?",
        ),
        (
            "unit",
            "How much does {n} grams of {f} cost?",
            "How much does {n} kilograms of {f} cost?",
        ),
        (
            "unit",
            "Is {n}0 degrees Celsius too hot for {x}?",
            "Is {n}0 degrees Fahrenheit too hot for {x}?",
        ),
        ("unit", "Can I park in {a} for {n} hours?", "Can I park in {a} for {n} days?"),
        (
            "unit",
            "Is a {n} GB file too large for the {t}?",
            "Is a {n} MB file too large for the {t}?",
        ),
        (
            "unit",
            "How many calories are in {n} ounces of {f}?",
            "How many calories are in {n} pounds of {f}?",
        ),
        (
            "unit",
            "Should an adult take {n}0 mg of {drug}?",
            "Should an adult take {n}0 ml of {drug}?",
        ),
        (
            "unit",
            "Is a salary of {n}000 euros good in {a}?",
            "Is a salary of {n}000 dollars good in {a}?",
        ),
        ("unit", "Can {x} jump {n} feet?", "Can {x} jump {n} inches?"),
        ("unit", "Is a speed of {n}0 km/h legal in {c}?", "Is a speed of {n}0 mph legal in {c}?"),
        ("unit", "How far is {a} from {b} in kilometres?", "How far is {a} from {b} in miles?"),
        (
            "date",
            "Who won the election in {c} in {year}?",
            "Who won the election in {c} in {year2}?",
        ),
        (
            "date",
            "What was the weather in {a} on {month} {day}?",
            "What was the weather in {a} on {month} {day2}?",
        ),
        ("date", "Is the museum in {a} open on Monday?", "Is the museum in {a} open on Sunday?"),
        (
            "date",
            "What are the opening hours of the zoo in {month}?",
            "What are the opening hours of the zoo in {month2}?",
        ),
        (
            "date",
            "What did {p} announce on {day} {month} {year}?",
            "What did {p} announce on {day2} {month} {year}?",
        ),
        ("date", "What is the forecast for {a} today?", "What is the forecast for {a} tomorrow?"),
        (
            "date",
            "What was the population of {c} in the {year}s?",
            "What was the population of {c} in the {year2}s?",
        ),
        (
            "date",
            "What were the sales of the {t} last month?",
            "What were the sales of the {t} this month?",
        ),
        ("date", "Summarise the meeting of {iso}", "Summarise the meeting of {year2}-01-{day}"),
        (
            "date",
            "Is there a flight to {a} at {hour} am?",
            "Is there a flight to {a} at {hour} pm?",
        ),
        ("date", "Who was born on {month} {day}, {year}?", "Who died on {month} {day}, {year}?"),
        ("entity swap", "What is the currency of {c}?", "What is the currency of {d}?"),
        ("entity swap", "Can {x} digest {f}?", "Can {x} digest {g}?"),
        ("entity swap", "Where did {p} go to school?", "Where did {q} go to school?"),
        ("entity swap", "How do I descale my {t}?", "How do I descale my {u}?"),
        ("entity swap", "Are {x} endangered in {c}?", "Are {y} endangered in {c}?"),
        (
            "entity swap",
            "What are the side effects of {drug}?",
            "What are the side effects of vitamin D?",
        ),
        ("entity swap", "Which bands are from {a}?", "Which bands are from {b}?"),
        ("entity swap", "How do I sort a list in Python?", "How do I sort a list in JavaScript?"),
        ("entity swap", "What does get_user_{n} return?", "What does get_user_{m} return?"),
        ("entity swap", "Who painted the portrait of {p}?", "Who painted the portrait of {q}?"),
        ("entity swap", "What is the tallest tower in {a}?", "What is the oldest tower in {a}?"),
        (
            "entity swap",
            "When was the university of {a} founded?",
            "Where was the university of {a} founded?",
        ),
        ("role swap", "Does {p} owe {q} money?", "Does {q} owe {p} money?"),
        (
            "role swap",
            "How do I convert {f} recipes from grams to cups?",
            "How do I convert {f} recipes from cups to grams?",
        ),
        ("role swap", "Did {c} invade {d}?", "Did {d} invade {c}?"),
        ("role swap", "Was the letter sent by {p} to {q}?", "Was the letter sent by {q} to {p}?"),
        ("role swap", "Is {a} further north than {b}?", "Is {b} further north than {a}?"),
        ("role swap", "Why did {p} sue {q}?", "Why did {q} sue {p}?"),
        ("role swap", "Are {x} afraid of {y}?", "Are {y} afraid of {x}?"),
        ("role swap", "What does {c} export to {d}?", "What does {d} export to {c}?"),
        (
            "role swap",
            "Can a tenant sue the landlord in {a}?",
            "Can the landlord sue a tenant in {a}?",
        ),
        ("role swap", "Who is the teacher of {p}'s sister?", "Who is the sister of {p}'s teacher?"),
        ("role swap", "Should {f} be replaced with {g}?", "Should {g} be replaced with {f}?"),
        (
            "role swap",
            "Are all {x} pets or are all pets {x}?",
            "Are all pets {x} and are all {x} pets?",
        ),
        ("role swap", "Who called {p}?", "Who did {p} call?"),
        ("antonym", "What are the advantages of a {t}?", "What are the disadvantages of a {t}?"),
        (
            "antonym",
            "How can I increase the noise of the {t}?",
            "How can I reduce the noise of the {t}?",
        ),
        ("antonym", "What is the largest lake in {c}?", "What is the smallest lake in {c}?"),
        (
            "antonym",
            "How do I enable notifications on my {t}?",
            "How do I disable notifications on my {t}?",
        ),
        ("antonym", "Are {x} active at night?", "Are {x} active at daytime?"),
        ("antonym", "Where can I buy {f} in {a}?", "Where can I sell {f} in {a}?"),
        ("antonym", "What is the minimum dose of {drug}?", "What is the maximum dose of {drug}?"),
        ("antonym", "Is raw {f} healthy?", "Is raw {f} unhealthy?"),
        ("antonym", "What do importers in {c} pay?", "What do exporters in {c} pay?"),
        ("antonym", "Why are {x} popular in {c}?", "Why are {x} unpopular in {c}?"),
        (
            "antonym",
            "How do I upload photos from the {t}?",
            "How do I download photos from the {t}?",
        ),
        (
            "antonym",
            "Which streets in {a} are the safest?",
            "Which streets in {a} are the most dangerous?",
        ),
        (
            "temporal order",
            "What did {p} do before moving to {a}?",
            "What did {p} do after moving to {a}?",
        ),
        (
            "temporal order",
            "Who was the first president of {c}?",
            "Who was the last president of {c}?",
        ),
        (
            "temporal order",
            "Has {p} lived in {a} since {year}?",
            "Did {p} live in {a} until {year}?",
        ),
        ("temporal order", "Did {c} join before {d}?", "Did {d} join before {c}?"),
        ("temporal order", "Do I add {f} before {g}?", "Do I add {g} before {f}?"),
        (
            "temporal order",
            "Was the {t} invented earlier than the {u}?",
            "Was the {t} invented later than the {u}?",
        ),
        (
            "temporal order",
            "When does the next train leave {a}?",
            "When did the previous train leave {a}?",
        ),
        ("temporal order", "Who is the mayor of {a}?", "Who was the mayor of {a}?"),
        ("temporal order", "After {p} left, did {q} resign?", "After {q} left, did {p} resign?"),
        (
            "temporal order",
            "What happens at the beginning of the {f} harvest?",
            "What happens at the end of the {f} harvest?",
        ),
        ("temporal order", "Will {p} visit {a}?", "Did {p} visit {a}?"),
    ],
}

_PARAPHRASES: dict[Set, _Templates] = {
    "tuning": [
        ("framing", "What is the capital of {c}?", "Could you tell me what the capital of {c} is?"),
        ("framing", "Can {x} eat {f}?", "Do you know if {x} can eat {f}?"),
        ("framing", "How old is {p}?", "I'd like to know how old {p} is."),
        ("synonym", "Where can I buy a {t} in {a}?", "Where can I purchase a {t} in {a}?"),
        ("synonym", "How do I fix my {t}?", "How do I repair my {t}?"),
        ("synonym", "When does the film begin?", "When does the movie start?"),
        ("reordering", "What is the best museum in {a}?", "In {a}, what is the best museum?"),
        ("reordering", "What is {c}'s population?", "What is the population of {c}?"),
        ("voice", "Did {p} beat {q}?", "Was {q} beaten by {p}?"),
        ("voice", "Who wrote {p}?", "Who was {p} written by?"),
        ("contraction", "What's the capital of {c}?", "What is the capital of {c}?"),
        ("contraction", "Why doesn't my {t} start?", "Why does my {t} not start?"),
        (
            "number spelled out",
            "How do I cook {f} for {n} people?",
            "How do I cook {f} for {nw} people?",
        ),
        ("unit", "How long does a run of {n} km take?", "How long does a run of {n000} m take?"),
        ("date format", "What happened on {iso}?", "What happened on {month} {day}, {year}?"),
        ("wording", "How tall is the tower of {a}?", "What is the height of the tower of {a}?"),
        ("wording", "How do I clean a {t}?", "What is the best way to clean a {t}?"),
        ("wording", "Which planet is the largest?", "What is the largest planet?"),
        ("wording", "How much does {f} cost in {a}?", "What is the price of {f} in {a}?"),
    ],
    "report": [
        ("framing", "What is the currency of {c}?", "Please tell me the currency of {c}."),
        (
            "framing",
            "Where is the main station of {a}?",
            "Excuse me, where is the main station of {a}?",
        ),
        ("framing", "Are {x} endangered?", "I was wondering whether {x} are endangered."),
        ("framing", "How do {x} communicate?", "Can you explain how {x} communicate?"),
        (
            "framing",
            "What are the side effects of {drug}?",
            "Hi, what are the side effects of {drug}? Thanks!",
        ),
        ("framing", "Who is the mayor of {a}?", "Does anybody know who the mayor of {a} is?"),
        (
            "framing",
            "What time does the {a} zoo open?",
            "Quick question: what time does the {a} zoo open?",
        ),
        ("framing", "Is {f} good for your skin?", "Would you say {f} is good for your skin?"),
        (
            "framing",
            "Which language is spoken in {c}?",
            "I need to know which language is spoken in {c}.",
        ),
        ("synonym", "How big is the largest lake in {c}?", "How large is the biggest lake in {c}?"),
        ("synonym", "Which illness does {drug} treat?", "Which disease does {drug} treat?"),
        (
            "synonym",
            "Who is the author of the book about {x}?",
            "Who is the writer of the book about {x}?",
        ),
        ("synonym", "What kind of food do {x} need?", "What type of food do {x} require?"),
        ("synonym", "How can I reduce the cost of my {t}?", "How can I lower the price of my {t}?"),
        ("synonym", "Is it hard to find a job in {a}?", "Is it difficult to find a job in {a}?"),
        ("synonym", "Which error does the {t} show?", "Which error does the {t} display?"),
        ("synonym", "What are the benefits of {f}?", "What are the advantages of {f}?"),
        ("synonym", "Do children in {c} like {f}?", "Do kids in {c} enjoy {f}?"),
        (
            "synonym",
            "Which firms in {a} hire engineers?",
            "Which companies in {a} employ engineers?",
        ),
        ("synonym", "How often should I feed {x}?", "How frequently should I feed {x}?"),
        (
            "reordering",
            "What is the tallest building in {a}?",
            "In {a}, what is the tallest building?",
        ),
        ("reordering", "What are {p}'s hobbies?", "What are the hobbies of {p}?"),
        ("reordering", "During winter, what do {x} eat?", "What do {x} eat during winter?"),
        (
            "reordering",
            "If it rains, is the market in {a} closed?",
            "Is the market in {a} closed if it rains?",
        ),
        ("reordering", "Which city in {c} is the oldest?", "What is the oldest city in {c}?"),
        ("reordering", "Who is the president of {c}?", "Who is {c}'s president?"),
        ("reordering", "After the storm, was {a} flooded?", "Was {a} flooded after the storm?"),
        ("reordering", "With {f}, which wine goes well?", "Which wine goes well with {f}?"),
        ("voice", "Did {p} invite {q}?", "Was {q} invited by {p}?"),
        ("voice", "Who designed the bridge in {a}?", "Who was the bridge in {a} designed by?"),
        (
            "voice",
            "Which company bought the {a} airport?",
            "By which company was the {a} airport bought?",
        ),
        ("voice", "Who discovered {drug}?", "By whom was {drug} discovered?"),
        ("voice", "Do {x} pollinate flowers?", "Are flowers pollinated by {x}?"),
        ("voice", "When did {c} ban plastic bags?", "When were plastic bags banned in {c}?"),
        ("voice", "Did {c} defeat {d} in the final?", "Was {d} defeated by {c} in the final?"),
        ("contraction", "Who's the owner of the {t}?", "Who is the owner of the {t}?"),
        ("contraction", "Why isn't the {t} charging?", "Why is the {t} not charging?"),
        ("contraction", "Where's the best {f} in {a}?", "Where is the best {f} in {a}?"),
        ("contraction", "Why can't {x} see red?", "Why can {x} not see red?"),
        (
            "contraction",
            "What'll happen if {p} doesn't pay?",
            "What will happen if {p} does not pay?",
        ),
        ("contraction", "Which {x} don't hibernate?", "Which {x} do not hibernate?"),
        ("contraction", "When's {p}'s birthday?", "When is {p}'s birthday?"),
        (
            "number spelled out",
            "Can I mix {n} spoons of {f} with milk?",
            "Can I mix {nw} spoons of {f} with milk?",
        ),
        (
            "number spelled out",
            "What are the {nw} largest cities in {c}?",
            "What are the {n} largest cities in {c}?",
        ),
        (
            "number spelled out",
            "Is {n00} euros enough for a week in {a}?",
            "Is {nw} hundred euros enough for a week in {a}?",
        ),
        ("number spelled out", "Do {x} live for {n} years?", "Do {x} live for {nw} years?"),
        (
            "number spelled out",
            "Why does my {t} beep {n} times?",
            "Why does my {t} beep {nw} times?",
        ),
        (
            "number spelled out",
            "Who came 2nd in the {a} marathon?",
            "Who came second in the {a} marathon?",
        ),
        (
            "number spelled out",
            "Is a tip of {n}% normal in {c}?",
            "Is a tip of {nw} percent normal in {c}?",
        ),
        (
            "unit",
            "How many calories does {n} kg of {f} have?",
            "How many calories does {n000} grams of {f} have?",
        ),
        ("unit", "Can {x} sleep for {n} hours?", "Can {x} sleep for {n60} minutes?"),
        ("unit", "Is {n} km too far to walk in {a}?", "Is {n} kilometers too far to walk in {a}?"),
        ("unit", "Can I take {n00} mg of {drug}?", "Can I take {n00} milligrams of {drug}?"),
        ("unit", "Is ${n} a fair price for {f}?", "Is {n} dollars a fair price for {f}?"),
        ("unit", "Does the {t} weigh {n} lb?", "Does the {t} weigh {n} pounds?"),
        ("unit", "Is {n}0 °C too hot for {x}?", "Is {n}0 degrees Celsius too hot for {x}?"),
        (
            "date format",
            "Who was born on {day} {month} {year}?",
            "Who was born on {month} {day}, {year}?",
        ),
        (
            "date format",
            "What did {p} publish on {iso}?",
            "What did {p} publish on {day} {month} {year}?",
        ),
        (
            "date format",
            "Was {a} hit by a storm on {mon} {day}, {year}?",
            "Was {a} hit by a storm on {month} {day}, {year}?",
        ),
        (
            "date format",
            "Does the shop in {a} close at {hour} pm?",
            "Does the shop in {a} close at {hour24}:00?",
        ),
        (
            "date format",
            "Is {month} {day} a holiday in {c}?",
            "Is the {day}th of {month} a holiday in {c}?",
        ),
        (
            "date format",
            "Which laws did {c} pass in {mon} {year}?",
            "Which laws did {c} pass in {month} {year}?",
        ),
        (
            "date format",
            "Summarise the meeting of {month} {day}, {year}",
            "Summarise the meeting of {iso}",
        ),
        (
            "wording",
            "How old is the university of {a}?",
            "What is the age of the university of {a}?",
        ),
        ("wording", "How do I descale a {t}?", "What's the best way to descale a {t}?"),
        ("wording", "How many people live in {a}?", "What is the number of people living in {a}?"),
        ("wording", "What does {p} do for a living?", "What is {p}'s job?"),
        ("wording", "How far is it from {a} to {b}?", "What is the distance from {a} to {b}?"),
        ("wording", "How heavy is the {t}?", "What is the weight of the {t}?"),
        ("wording", "Can I bring {f} into {c}?", "Is it possible to bring {f} into {c}?"),
        ("wording", "Do I need a visa for {c}?", "Is a visa required for {c}?"),
        ("wording", "Why do {x} sleep so much?", "What is the reason {x} sleep so much?"),
        ("wording", "How much does a {t} cost?", "What is the price of a {t}?"),
        ("wording", "How long can {f} be stored?", "What is the shelf life of {f}?"),
        ("wording", "Am I allowed to keep {x} in {a}?", "Is it permitted to keep {x} in {a}?"),
    ],
}
