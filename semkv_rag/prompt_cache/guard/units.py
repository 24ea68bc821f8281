"""Units of measurement: what they measure, and how many of the base unit they are.

Factors are exact fractions, so that 5 km and 5,000 m are equal, and 1 mile and 1.6 km are not.
Different bases are different things here: months are not days, °C is not °F, "pound" is a mass.
"""

from __future__ import annotations

from fractions import Fraction

_TABLE = """
m: m metre metres meter meters = 1; km kilometre kilometres kilometer kilometers = 1000
m: cm centimetre centimetres centimeter centimeters = 1/100
m: mm millimetre millimetres millimeter millimeters = 1/1000
m: mile miles = 201168/125; yard yards yd = 1143/1250; foot feet ft = 381/1250
m: inch inches = 127/5000
m: µm micrometre micrometres micrometer micrometers = 1/1000000
m: nm nanometre nanometres nanometer nanometers = 1/1000000000
g: g gram grams gramme grammes = 1; kg kilogram kilograms kilo kilos = 1000
g: mg milligram milligrams = 1/1000
g: µg mcg microgram micrograms = 1/1000000; lb lbs pound pounds = 45359237/100000
g: oz ounce ounces = 45359237/1600000; tonne tonnes = 1000000
s: s sec secs second seconds = 1; ms millisecond milliseconds = 1/1000
s: min mins minute minutes = 60; hr hrs hour hours = 3600
s: day days = 86400; week weeks = 604800; fortnight fortnights = 1209600
month: month months = 1; year years yr yrs = 12; decade decades = 120; century centuries = 1200
l: l litre litres liter liters = 1; ml millilitre millilitres milliliter milliliters = 1/1000
l: cl centilitre centilitres = 1/100
l: gallon gallons = 473176473/125000000; pint pints = 473176473/1000000000
l: quart quarts = 473176473/500000000
byte: byte bytes = 1; kb kilobyte kilobytes = 1000; mb megabyte megabytes = 1000000
byte: gb gigabyte gigabytes = 1000000000; tb terabyte terabytes = 1000000000000
byte: kib = 1024; mib = 1048576; gib = 1073741824; tib = 1099511627776
celsius: celsius centigrade °c = 1
fahrenheit: fahrenheit °f = 1
kelvin: kelvin kelvins = 1
degree: degree degrees ° = 1
percent: % percent pct = 1
hz: hz hertz = 1; khz kilohertz = 1000; mhz megahertz = 1000000; ghz gigahertz = 1000000000
w: w watt watts = 1; kw kilowatt kilowatts = 1000; mw megawatt megawatts = 1000000
w: gw gigawatt gigawatts = 1000000000
wh: wh = 1; kwh = 1000; mwh = 1000000
v: v volt volts = 1
amp: amp amps ampere amperes = 1
j: joule joules = 1; kj kilojoule kilojoules = 1000; cal = 523/125; kcal = 4184
m/s: m/s = 1; km/h kph kmh = 5/18; mph = 1397/3125
usd: $ usd dollar dollars = 1; cent cents = 1/100
eur: € eur euro euros = 1
gbp: £ gbp = 1
jpy: ¥ jpy yen = 1
inr: ₹ inr rupee rupees = 1
ha: ha hectare hectares = 1
acre: acre acres = 1
dozen: dozen dozens = 1
"""


def _parse() -> dict[str, tuple[str, Fraction, str]]:
    units = {}
    for line in _TABLE.strip().splitlines():
        base, _, rest = line.partition(":")
        for entry in rest.split(";"):
            names, _, factor = entry.partition("=")
            first = names.split()[0]
            for name in names.split():
                units[name] = (base, Fraction(factor.strip()), first)
    return units


UNITS = _parse()
"""Name, lower case -> what it measures, how many of the base unit, its own short name."""

CASED = {
    "Mb": "megabit", "Gb": "gigabit", "kb": "kilobit", "Kb": "kilobit", "mW": "milliwatt", "MW": "mw",
    "M": "million", "C": "°c", "F": "°f", "K": "kelvin",
}  # fmt: skip
"""Where case tells units apart: as written -> name."""

CURRENCIES = frozenset("$€£¥₹")

SPEEDS = {"km": "km/h", "mile": "mph", "m": "m/s"}
"""Short name of a length -> the speed that "per hour" ("per second" for metres) makes of it."""
