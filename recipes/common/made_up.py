"""Generates simple random sentences; not a recipe itself."""

from pydoc_data.topics import topics

WORDS = (
    "woman child teacher doctor dog bird engineer company team king writer farmer "
    "bank government student nurse driver singer minister player scientist car",
    "want see watch write buy sell build find carry open close lose move change "
    "help hold paint play read show start stop teach visit win break eat follow",
    "house book letter game song price market window door train river picture bread "
    "law car phone story question answer road computer table money horse team water",
    "today yesterday_evening in_the_garden at_school near_the_station in_London "
    "slowly quickly every_morning after_the_meeting on_the_street for_two_years "
    "with_a_friend before_dinner without_a_reason in_the_rain at_nine_o'clock",
)


def sentences(generator, count):
    """Returns random sentences, a third with two clauses.

    Some sentences are from Python's manual, which has longer words.
    """
    manual = [x for topic in topics.values() for x in topic.split(". ")]
    manual = [x for x in manual if len(x) > 40 and "::=" not in x]

    def clause():
        who, does, what, where = (generator.choice(x.split()) for x in WORDS)
        many = generator.random() < 0.5
        subject = f"The {who}s" if many else f"{generator.choice(['A', 'One'])} {who}"
        return f"{subject} {does}{'' if many else 's'} the {what} {where}".replace(
            "_", " "
        )

    found = []
    for kind in generator.random(count):
        if kind < 0.25:
            found.append(generator.choice(manual))
        else:
            joint = generator.choice([" and ", ", but ", " when ", "; "])
            found.append(joint.join(clause() for _ in range(1 + (kind > 0.7))) + ".")
    return found
