"""The words of the quickstart collection: topics, concepts, and four synonyms per concept.

A line of a topic lists concepts separated by commas; the words of a concept are synonyms. No word
belongs to two concepts, so that an oracle that knows this file knows what every text is about.
"""

from typing import NamedTuple

Concept = tuple[str, ...]


class Topic(NamedTuple):
    """One field of knowledge: what is talked about, and what is done there."""

    name: str
    nouns: tuple[Concept, ...]
    verbs: tuple[Concept, ...]


def _concepts(text: str) -> tuple[Concept, ...]:
    return tuple(tuple(concept.split()) for concept in text.split(","))


def _topic(name: str, nouns: str, verbs: str) -> Topic:
    return Topic(name, _concepts(nouns), _concepts(verbs))


TOPICS = (
    _topic(
        "medicine",
        """doctor physician medic clinician, illness disease ailment sickness,
        drug medicine remedy medication, hospital clinic infirmary sanatorium,
        wound injury laceration gash, nurse caregiver attendant orderly,
        vaccine jab inoculation immunization, surgery operation procedure intervention,
        belly stomach abdomen tummy, patient invalid sufferer convalescent,
        pain ache soreness discomfort, germ bacterium microbe pathogen""",
        """cured healed treated relieved, diagnosed identified detected recognized,
        prescribed recommended advised suggested, examined inspected checked scrutinized""",
    ),
    _topic(
        "transport",
        """car automobile vehicle motorcar, road street highway avenue, journey trip tour trek,
        train locomotive railcar tram, airplane aircraft jet plane, bicycle bike cycle tandem,
        driver chauffeur motorist cabbie, traffic congestion gridlock bottleneck,
        ticket pass fare voucher, luggage baggage suitcase trunk, station terminal depot terminus,
        bridge overpass viaduct flyover""",
        """reached entered approached neared, departed abandoned exited left,
        halted stopped paused delayed, drove steered piloted navigated""",
    ),
    _topic(
        "cooking",
        """meal dinner supper feast, soup broth stew chowder, cook chef baker caterer,
        sugar sweetener syrup molasses, bread loaf bun roll, restaurant diner bistro eatery,
        beef steak meat sirloin, sauce gravy relish ketchup, pot pan kettle saucepan,
        stove oven cooker hob, dessert pudding cake pastry, spice seasoning herb condiment""",
        """baked roasted grilled toasted, chopped sliced diced minced,
        ate devoured consumed swallowed, stirred mixed blended whisked""",
    ),
    _topic(
        "law",
        """lawyer attorney barrister solicitor, judge magistrate justice arbiter,
        crime offence felony misdeed, thief robber burglar bandit,
        prison jail penitentiary dungeon, police constable officer sheriff,
        contract agreement treaty pact, evidence proof testimony exhibit,
        court tribunal courthouse assizes, fine penalty sanction forfeit,
        law statute decree ordinance, witness bystander onlooker observer""",
        """accused charged indicted blamed, stole robbed pilfered swiped,
        freed released liberated acquitted, sued prosecuted litigated impeached""",
    ),
    _topic(
        "school",
        """teacher instructor tutor lecturer, pupil student learner scholar,
        lesson class course seminar, exam test quiz assessment,
        essay paper composition thesis, book textbook volume tome,
        school academy college lyceum, mark grade score rating,
        homework assignment exercise task, desk table bench lectern, pen pencil quill crayon,
        library archive repository athenaeum""",
        """taught instructed educated coached, memorized learned mastered absorbed,
        wrote drafted penned scribbled, explained clarified illustrated elucidated""",
    ),
    _topic(
        "weather",
        """rain drizzle downpour shower, storm tempest hurricane gale,
        snow sleet blizzard flurry, fog mist haze murk, sunshine sunlight daylight sunbeam,
        frost chill cold iciness, heat warmth hotness swelter, cloud overcast nimbus cumulus,
        wind breeze gust draught, flood deluge inundation torrent,
        forecast prediction prognosis outlook, thunder lightning thunderclap thunderbolt""",
        """drenched soaked wetted saturated, froze iced stiffened congealed,
        melted thawed softened dissolved, blew swirled whirled scattered""",
    ),
    _topic(
        "finance",
        """money cash currency funds, bank lender creditor financier, loan credit mortgage advance,
        profit gain earnings surplus, debt liability arrears obligation, tax levy duty tariff,
        salary wage pay stipend, investor shareholder backer stakeholder,
        company firm corporation enterprise, invoice bill receipt statement,
        shop store market boutique, budget plan allowance allocation""",
        """bought purchased acquired procured, sold vended traded auctioned,
        saved hoarded stashed deposited, borrowed leased rented hired""",
    ),
    _topic(
        "sport",
        """game match contest bout, athlete player sportsman competitor,
        trainer manager mentor coach, goal point basket touchdown, team squad lineup eleven,
        stadium arena ballpark gymnasium, race sprint marathon relay, medal trophy cup prize,
        referee umpire linesman adjudicator, racket bat club paddle,
        fan supporter spectator enthusiast, victory win triumph conquest""",
        """beat defeated conquered outplayed, missed lost forfeited fumbled,
        jumped leaped vaulted hopped, threw tossed hurled flung""",
    ),
    _topic(
        "music",
        """song tune melody ballad, singer vocalist crooner soprano,
        concert recital gig performance, band orchestra ensemble quartet,
        drum percussion tambourine snare, guitar lute banjo mandolin,
        piano keyboard harpsichord pianoforte, composer songwriter arranger lyricist,
        album record disc recording, rhythm tempo cadence pulse, violin fiddle viola cello,
        applause ovation clapping cheers""",
        """sang chanted crooned hummed, played strummed plucked fiddled,
        danced waltzed twirled jigged, rehearsed practised prepared drilled""",
    ),
    _topic(
        "building",
        """house home dwelling residence, carpenter joiner woodworker cabinetmaker,
        wall partition barrier rampart, builder mason bricklayer contractor,
        hammer mallet sledge gavel, roof ceiling rafter shingle,
        window pane skylight casement, tower skyscraper highrise spire,
        door gate entrance portal, timber wood lumber plank, basement cellar vault crypt,
        blueprint drawing draft layout""",
        """built constructed erected assembled, repaired mended fixed restored,
        demolished razed wrecked dismantled, painted coated varnished lacquered""",
    ),
    _topic(
        "farming",
        """farmer grower peasant rancher, field meadow pasture paddock, cow cattle ox heifer,
        horse pony stallion mare, pig hog swine boar, harvest crop yield produce,
        barn shed stable outbuilding, plough tractor tiller harrow, grain wheat corn barley,
        chicken hen rooster fowl, fence hedge palisade railing,
        manure fertilizer compost dung""",
        """planted sowed seeded cultivated, picked gathered reaped harvested,
        fed nourished grazed fattened, watered irrigated sprinkled hosed""",
    ),
    _topic(
        "sea",
        """ship boat vessel craft, sailor seaman mariner deckhand, sea ocean deep brine,
        captain skipper commander helmsman, harbour port dock marina, wave swell breaker billow,
        shore beach coast seaside, fish trout salmon herring, anchor grapnel mooring kedge,
        island isle islet atoll, net trawl seine dragnet, pirate buccaneer corsair privateer""",
        """sailed cruised crossed voyaged, sank foundered capsized submerged,
        caught hooked angled netted, rescued recovered salvaged retrieved""",
    ),
)

ADJECTIVES = _concepts(
    """big large huge vast, small little tiny compact, old ancient aged elderly,
    new modern recent fresh, fast quick rapid swift, slow gradual sluggish unhurried,
    cheap inexpensive affordable economical, costly expensive pricey dear,
    difficult hard tough demanding, easy simple effortless straightforward,
    famous renowned celebrated noted, strange odd peculiar unusual, quiet silent calm peaceful,
    dangerous risky perilous hazardous, happy glad cheerful joyful, sad unhappy gloomy sorrowful"""
)

# Words without a concept tell nothing about relevance: adverbs, and names made of three parts.
(ADVERBS,) = _concepts(
    """yesterday today later eventually again meanwhile afterwards suddenly finally often perhaps
    together twice once nearby apparently certainly probably indeed however already soon always
    never usually rarely almost quite rather instead"""
)
ONSETS, MIDDLES, ENDINGS = _concepts(
    """b d f g k l m n p r s t v z br dr gr kl tr st h j,
    al an ar ed el en er il in ir ol on or um un ur am em im om,
    a o i us ska vik mar dale ford wick ton by heim stad ova ello"""
)
