"""Texts about people. `story`: they go to places, take things and give them away; the answer is a word of the story.
`dialogue`: they greet each other and say what they like, where they go, what they have; the question is about what was
just said.
"""

from __future__ import annotations

from typing import NamedTuple

from stoker.training.world.world import Case, Dice, World, pair_held, said_so, wordings

MOVES = ("went", "walked", "ran", "came")
TAKES = ("took", "found", "got")
ENDS = ("Now", "At the end,", "So")
WHERE = wordings(
    "Where is {p}? Where is {p} now? In which place is {p}? Which place is {p} in? Say where {p} is."
    " Tell me where {p} is now. Can you say where {p} is? {p} is in which place? Where did {p} go?"
    " At the end, where is {p}?",
    "Do you know where {p} is? What place is {p} in now? Please say where {p} is.",
)
WHO = wordings(
    "Who has the {t}? Who has the {t} now? Say who has the {t}. Tell me who has the {t} now."
    " Can you say who has the {t}? Who is it that has the {t}? Now who has the {t}? Please say who has the {t}.",
    "Do you know who has the {t}? At the end, who has the {t}?",
)
WHAT = wordings(
    "What does {p} have? What does {p} have now? Say what {p} has. Tell me what {p} has now."
    " Can you say what {p} has? What is it that {p} has? Which thing does {p} have? At the end, what does {p} have?",
    "Do you know what {p} has? Please say what {p} has.",
)
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
    "like": wordings(
        "What do I like? Say what I like. Tell me what I like. What is it that I like? What food do I like?"
        " Do you know what I like?",
        "Which food do I like? Please say what I like.",
    ),
    "go": wordings(
        "Where do I go? Where am I going? Say where I am going. Tell me where I go. Which place do I go to?"
        " Please say where I go.",
        "Do you know where I am going? To which place do I go?",
    ),
    "have": wordings(
        "What do I have? Say what I have. Tell me what I have. What is it that I have? Which thing do I have?"
        " Do you know what I have?",
        "What thing do I have? Please say what I have.",
    ),
    "name": wordings(
        "What is my name? Who am I? Say my name. Tell me who I am. Tell me my name. Can you say who I am?"
        " Do you know who I am?",
        "Do you know my name? Please say my name.",
    ),
}
THEIRS = {
    "like": wordings(
        "What does {p} like? Say what {p} likes. Tell me what {p} likes. What is it that {p} likes?"
        " What food does {p} like?",
        "Do you know what {p} likes? Which food does {p} like? Please say what {p} likes.",
    ),
    "go": wordings(
        "Where does {p} go? Where is {p} going? Say where {p} is going. Tell me where {p} goes."
        " Which place does {p} go to?",
        "Do you know where {p} is going? To which place does {p} go? Please say where {p} goes.",
    ),
    "have": wordings(
        "What does {p} have? Say what {p} has. Tell me what {p} has now. What is it that {p} has?"
        " Which thing does {p} have?",
        "Do you know what {p} has? What thing does {p} have? Please say what {p} has.",
    ),
}
YOU = {"like": "You like {}.", "go": "You are going to the {}.", "have": "You have the {}.", "name": "Your name is {}."}
THEY = {"like": "{} likes {}.", "go": "{} is going to the {}.", "have": "{} has the {}."}
LAST = ("That is good.", "I am happy, my friend.", "Thank you.", "It is a good day.")
TOPICS = ("like", "go", "have")


class Story(NamedTuple):
    text: str
    people: list[str]
    where: dict[str, str]  # person -> place
    has: dict[str, str]  # thing -> person


def tell(w: World, dice: Dice, held: bool) -> Story:
    low, high = w.lexicon.sentences
    people = dice.some(w.names, 2 + dice.below(1 + 2 * w.level))
    where: dict[str, str] = {}
    holds: dict[str, str] = {}
    told: list[str] = []
    places, things = w.places[held], w.things[held]
    for at in range(low + dice.below(high - low + 1)):
        person, draw = dice.pick(people), dice.random()
        if at and dice.random() < 0.2:
            told.append("Then")
        carried = holds.get(person)
        if carried and draw < 0.4:
            other = dice.pick(people)
            if other not in holds and carried in things[other]:
                told.append(f"{person} gave the {carried} to {other}.")
                holds[other] = holds.pop(person)
                continue
        if carried is None and draw < 0.5 and at:
            thing = dice.pick(things[person])
            if thing not in holds.values():
                told.append(f"{person} {dice.pick(TAKES)} the {thing}.")
                holds[person] = thing
                continue
        place = dice.pick(places[person])
        while place == where.get(person):
            place = dice.pick(places[person])
        told.append(f"{person} {dice.pick(MOVES)} to the {place}.")
        where[person] = place
    return Story(" ".join(told), people, where, {thing: person for person, thing in holds.items()})


def story_case(w: World, dice: Dice, held: bool) -> Case:
    while True:
        story = tell(w, dice, held)
        if story.has and dice.random() < 0.6:
            thing, person = dice.pick(list(story.has.items()))
            if held and not pair_held(person, thing):
                continue
            ask = _who if dice.random() < 0.5 else _what
            return ask(w, dice, held, story, thing, person)
        person, place = dice.pick(list(story.where.items()))
        if held and not pair_held(person, place):
            continue
        wrong = _other(dice, list(story.where.values()), w.places[held][person], place)
        prompt = f"{story.text} {WHERE.draw(dice, held).format(p=person)}"
        return said_so("story", prompt, place, wrong, f"{person} is in the {{}}.", among=w.lexicon.places)


def _who(w: World, dice: Dice, held: bool, story: Story, thing: str, person: str) -> Case:
    wrong = _other(dice, story.people, [name for name in w.names if thing in w.things[held][name]], person)
    prompt = f"{story.text} {WHO.draw(dice, held).format(t=thing)}"
    return said_so("story", prompt, person, wrong, f"{{}} has the {thing}.", among=w.names)


def _what(w: World, dice: Dice, held: bool, story: Story, thing: str, person: str) -> Case:
    wrong = _other(dice, list(story.has), w.things[held][person], thing)
    prompt = f"{story.text} {WHAT.draw(dice, held).format(p=person)}"
    return said_so("story", prompt, thing, wrong, f"{person} has the {{}}.", among=w.lexicon.things)


def _other(dice: Dice, near: list[str], allowed: list[str], right: str) -> str:
    """A wrong answer: one of the story's own words where that may stand in this file, or any."""
    found = dice.pick(near) if dice.random() < 0.7 else dice.pick(allowed)
    while found == right or found not in allowed:
        found = dice.pick(allowed)
    return found


def story_text(w: World, dice: Dice, held: bool) -> str:
    """A story, and often how it ended."""
    story = tell(w, dice, held)
    while (
        held
        and not any(pair_held(story.has[thing], thing) for thing in story.has)
        and not any(map(pair_held, story.where, story.where.values()))
    ):
        story = tell(w, dice, held)
    if dice.random() < 0.4:
        return story.text
    ends = [f"{person} is in the {place}." for person, place in story.where.items()] + [
        f"{person} has the {thing}." for thing, person in story.has.items()
    ]
    return " ".join([story.text, dice.pick(ENDS), *dice.some(ends, min(2, len(ends)))])


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


def dialogue_case(w: World, dice: Dice, held: bool) -> Case:
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
    before: tuple[tuple[str, str], ...] = ()
    prompt, among = f"{said} {question}", w.names if asked == "name" else _class(w, topic)
    if draw < 0.7:
        prompt = f"{greeting} {named} {dice.pick(SMALL)} {prompt}"
    else:
        before = (("user", f"{greeting} {named}"), ("assistant", f"Hello, {person}. {dice.pick(REPLIES)}"))
    return said_so("dialogue", prompt, answer, wrong, YOU[asked], before=before, among=among)


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
    return said_so("dialogue", prompt, value, wrong, THEY[topic].format(person, "{}"), among=_class(w, topic))


def dialogue_text(w: World, dice: Dice, held: bool) -> str:
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
