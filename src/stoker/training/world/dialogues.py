"""`dialogue`: people greet each other and say what they like, where they go, what they have; the question is about what
was just said.
"""

from __future__ import annotations

from stoker.training.world.case import Asked, Case
from stoker.training.world.dice import Dice
from stoker.training.world.splits import pair_held
from stoker.training.world.world import World

GREETINGS = ("Hello.", "Good day.", "Hello, my friend.", "Good morning.")
NAMED = ("My name is {}.", "I am {}.")
SMALL = ("How are you?", "It is a good day.", "I am fine.", "The sun is out.", "Thank you.", "I am happy.")
REPLIES = (
    "I am fine. And you?",
    "Hello. I am happy to see you.",
    "Good day. How can I help?",
    "Thank you. It is a good day.",
)
SAID = {
    "like": ("I like {}.", "I love {}.", "My favourite food is {}."),
    "go": ("I am going to the {}.", "I want to go to the {}.", "I go to the {} now."),
    "have": ("I have the {} here.", "I found the {}.", "I have the {} with me."),
}
MINE = {
    "like": Asked(
        (
            "What do I like?",
            "Say what I like.",
            "Tell me what I like.",
            "What is it that I like?",
            "What food do I like?",
            "Do you know what I like?",
        ),
        ("Which food do I like?", "Please say what I like."),
    ),
    "go": Asked(
        (
            "Where do I go?",
            "Where am I going?",
            "Say where I am going.",
            "Tell me where I go.",
            "Which place do I go to?",
            "Please say where I go.",
        ),
        ("Do you know where I am going?", "To which place do I go?"),
    ),
    "have": Asked(
        (
            "What do I have?",
            "Say what I have.",
            "Tell me what I have.",
            "What is it that I have?",
            "Which thing do I have?",
            "Do you know what I have?",
        ),
        ("What thing do I have?", "Please say what I have."),
    ),
    "name": Asked(
        (
            "What is my name?",
            "Who am I?",
            "Say my name.",
            "Tell me who I am.",
            "Tell me my name.",
            "Can you say who I am?",
            "Do you know who I am?",
        ),
        ("Do you know my name?", "Please say my name."),
    ),
}
THEIRS = {
    "like": Asked(
        (
            "What does {p} like?",
            "Say what {p} likes.",
            "Tell me what {p} likes.",
            "What is it that {p} likes?",
            "What food does {p} like?",
        ),
        ("Do you know what {p} likes?", "Which food does {p} like?", "Please say what {p} likes."),
    ),
    "go": Asked(
        (
            "Where does {p} go?",
            "Where is {p} going?",
            "Say where {p} is going.",
            "Tell me where {p} goes.",
            "Which place does {p} go to?",
        ),
        ("Do you know where {p} is going?", "To which place does {p} go?", "Please say where {p} goes."),
    ),
    "have": Asked(
        (
            "What does {p} have?",
            "Say what {p} has.",
            "Tell me what {p} has now.",
            "What is it that {p} has?",
            "Which thing does {p} have?",
        ),
        ("Do you know what {p} has?", "What thing does {p} have?", "Please say what {p} has."),
    ),
}
YOU = {"like": "You like {}.", "go": "You are going to the {}.", "have": "You have the {}.", "name": "Your name is {}."}
THEY = {"like": "{} likes {}.", "go": "{} is going to the {}.", "have": "{} has the {}."}
LAST = ("That is good.", "I am happy, my friend.", "Thank you.", "It is a good day.")
TOPICS = ("like", "go", "have")


def _about(w: World, topic: str, held: bool, person: str) -> list[str]:
    return {"like": w.dishes, "go": w.places, "have": w.things}[topic][held][person]


def _class(w: World, topic: str) -> list[str]:
    return {"like": w.lexicon.dishes, "go": w.lexicon.places, "have": w.lexicon.things}[topic]


def _pair(w: World, dice: Dice, held: bool) -> tuple[str, str, str]:
    """Who says it, on which topic, what."""
    while True:
        person, topic = dice.pick(w.names), dice.pick(TOPICS)
        value = dice.pick(_about(w, topic, held, person))
        if not held or pair_held(person, value):
            return person, topic, value


def _not(dice: Dice, among: list[str], right: str) -> str:
    found = right
    while found == right:
        found = dice.pick(among)
    return found


def case(w: World, dice: Dice, held: bool) -> Case:
    person, topic, value = _pair(w, dice, held)
    said = dice.pick(SAID[topic]).format(value)
    draw = dice.random()
    if draw < 0.4:
        return _theirs(w, dice, held, (person, topic, value), said)
    named, greeting = dice.pick(NAMED).format(person), dice.pick(GREETINGS)
    if dice.random() < 0.25:
        others = [name for name in w.names if value in _about(w, topic, held, name)]
        asked, answer, wrong = "name", person, _not(dice, others, person)
    else:
        asked, answer, wrong = topic, value, _not(dice, _about(w, topic, held, person), value)
    question = MINE[asked].draw(dice, held)
    parts = (answer, YOU[asked].format(answer), wrong, YOU[asked].format(wrong))
    among = w.names if asked == "name" else _class(w, topic)
    if draw < 0.7:
        return Case("dialogue", f"{greeting} {named} {dice.pick(SMALL)} {said} {question}", *parts, among=among)
    reply = f"Hello, {person}. {dice.pick(REPLIES)}"
    return Case(
        "dialogue",
        f"{said} {question}",
        *parts,
        before=(("user", f"{greeting} {named}"), ("assistant", reply)),
        among=among,
    )


def _theirs(w: World, dice: Dice, held: bool, told: tuple[str, str, str], said: str) -> Case:
    person, topic, value = told
    other = _not(dice, w.names, person)
    others = dice.pick(_about(w, topic, held, other))
    lines = [f"{person} says: {said}", f"{other} says: {dice.pick(SAID[topic]).format(others)}"]
    if dice.random() < 0.5:
        lines.reverse()
    allowed = _about(w, topic, held, person)
    wrong = others if others != value and others in allowed else _not(dice, allowed, value)
    prompt = f"{' '.join(lines)} {THEIRS[topic].draw(dice, held).format(p=person)}"
    return Case(
        "dialogue",
        prompt,
        value,
        THEY[topic].format(person, value),
        wrong,
        THEY[topic].format(person, wrong),
        among=_class(w, topic),
    )


def text(w: World, dice: Dice, held: bool) -> str:
    """Two people talk, and somebody tells afterwards what was said."""
    first, topic, value = _pair(w, dice, held)
    second, other_topic, other_value = _pair(w, dice, held)
    lines = [
        f"{first} says: {dice.pick(GREETINGS)} {dice.pick(SMALL)}",
        f"{second} says: {dice.pick(GREETINGS)} {dice.pick(SMALL)} {dice.pick(SAID[other_topic]).format(other_value)}",
        f"{first} says: {dice.pick(SAID[topic]).format(value)} {dice.pick(SMALL)}",
    ]
    if dice.random() < 0.6 and first != second:
        lines.append(f"{THEY[topic].format(first, value)} {THEY[other_topic].format(second, other_value)}")
    return "\n".join(lines)


def small_talk(w: World, dice: Dice) -> list[tuple[str, str]]:
    """A conversation that asks nothing: role, content."""
    person, topic, value = _pair(w, dice, False)
    turns = [
        ("user", f"{dice.pick(GREETINGS)} {dice.pick(NAMED).format(person)}"),
        ("assistant", f"Hello, {person}. {dice.pick(REPLIES)}"),
    ]
    if dice.random() < 0.6:
        turns += [
            ("user", f"{dice.pick(SMALL)} {dice.pick(SAID[topic]).format(value)}"),
            ("assistant", f"{YOU[topic].format(value)} {dice.pick(LAST)}"),
        ]
    return turns
