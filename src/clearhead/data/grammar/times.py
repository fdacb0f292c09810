"""Random dates, clock times, durations, prices and ages in three languages."""

from collections.abc import Callable

from clearhead.data.grammar.nodes import Adverbial

Dice = Callable[[], float]  # uniform in [0, 1)
MONTHS = (
    ("January", "Januar"),
    ("February", "Februar"),
    ("March", "März"),
    ("April", "April"),
    ("May", "Mai"),
    ("June", "Juni"),
    ("July", "Juli"),
    ("August", "August"),
    ("September", "September"),
    ("October", "Oktober"),
    ("November", "November"),
    ("December", "Dezember"),
)
WEEKDAYS = (
    ("Monday", "Montag", "星期一"),
    ("Tuesday", "Dienstag", "星期二"),
    ("Wednesday", "Mittwoch", "星期三"),
    ("Thursday", "Donnerstag", "星期四"),
    ("Friday", "Freitag", "星期五"),
    ("Saturday", "Samstag", "星期六"),
    ("Sunday", "Sonntag", "星期天"),
)
FEW = (("two", "zwei", "两"), ("three", "drei", "三"), ("four", "vier", "四"), ("five", "fünf", "五"))


def date(at: int, dice: Dice) -> Adverbial:
    """on May 3 · am 3. Mai · 5月3日"""
    month, day = int(dice() * 12), 1 + int(dice() * 28)
    english, german = MONTHS[month]
    return Adverbial(
        at,
        "date",
        (("on", (3,)), (english, (1,)), (str(day), (2,))),
        (("am", (3,)), (f"{day}.", (2,)), (german, (1,))),
        ((f"{month + 1}月", (1,)), (f"{day}日", (2,))),
    )


def weekday(at: int, dice: Dice, tense: str) -> Adverbial:
    """last Monday · letzten Montag · 上星期一, or next Monday"""
    english, german, chinese = WEEKDAYS[int(dice() * 7)]
    which = ("last", "letzten", "上") if tense == "past" else ("next", "nächsten", "下")
    return Adverbial(
        at,
        "date",
        ((which[0], (1,)), (english, (2,))),
        ((which[1], (1,)), (german, (2,))),
        ((which[2] + chinese, (1, 2)),),
    )


def clock(at: int, dice: Dice) -> Adverbial:
    """at 8 o'clock · um 8 Uhr · 8点"""
    hour = str(6 + int(dice() * 6))
    return Adverbial(
        at,
        "clock",
        (("at", (3,)), (hour, (1,)), ("o'clock", (2,))),
        (("um", (3,)), (hour, (1,)), ("Uhr", (2,))),
        ((f"{hour}点", (1, 2)),),
    )


def hours(at: int, dice: Dice) -> Adverbial:
    """for three hours · drei Stunden lang · 三个小时"""
    english, german, chinese = FEW[int(dice() * 4)]
    return Adverbial(
        at,
        "span",
        (("for", (3,)), (english, (1,)), ("hours", (2,))),
        ((german, (1,)), ("Stunden", (2,)), ("lang", (3,))),
        ((chinese, (1,)), ("个", (1,)), ("小时", (2,))),
    )


def price(at: int, number: int) -> Adverbial:
    """12 euros · 12 Euro · 12欧元"""
    amount = (str(number), (1,))
    return Adverbial(at, "money", (amount, ("euros", (2,))), (amount, ("Euro", (2,))), (amount, ("欧元", (2,))))


def age(at: int, number: int) -> Adverbial:
    """9 years old · 9 Jahre alt · 9岁"""
    amount = (str(number), (1,))
    english = (amount, ("years", (2,)), ("old", (3,)))
    german = (amount, ("Jahre", (2,)), ("alt", (3,)))
    return Adverbial(at, "age", english, german, (amount, ("岁", (2, 3))))
