"""Word lists of the recall text.

Each word is one token of the recall tokenizer when a space precedes it, so a name costs two tokens and a question about
a fact names it by the same tokens as the fact does.
"""

from __future__ import annotations

FIRST_NAMES = """
Ada Agnes Alma Amos Anton Arlo Astrid Aurel Basil Beatrix Bela Bruno Callum Carla Cecil Clara Conrad Cora Cyril Dagmar
Dalia Darius Delia Dmitri Dora Edgar Edith Elias Elsa Emil Enid Ernst Esther Ethel Fabian Felix Fergus Fiona Flora
Frida Gareth Gerda Gideon Greta Gustav Hanna Harald Hector Heidi Helga Hilda Homer Horace Hugo Ida Ilse Imre Ines
Ingrid Irma Isaac Ivan Jasper Jelena Jonas Judith Julius Karin Kaspar Katya Klaus Lars Laszlo Leila Leopold Liam Lidia
Linus Lotte Lucian Magda Malcolm Marek Martha Matilda Milo Mira Moira Nadia Natalia Nestor Nikolai Nora Olaf Olga
Oscar Otto Pavel Petra Phoebe Quentin Ralph Ramona Regina Roland Rosa Rufus Sabine Selma Silas Sonja Stefan Tamara
Thea Tobias Ursula Viktor Wanda Yara Zoltan
""".split()

LAST_NAMES = """
Abbott Adler Ames Archer Ashby Bailey Barlow Becker Benson Birch Blake Bolton Bowen Brandt Briggs Burke Calder Carver
Chase Clegg Coburn Conway Crane Crosby Curtis Dalton Decker Denton Dixon Doyle Drake Dunbar Eaton Ellis Emery Farrow
Fenton Fisk Forbes Foster Frost Gable Garner Gibbs Gorman Graves Griggs Hale Harlow Hatch Hayes Heller Hobbs Holt
Hooper Horton Howe Hurst Ingram Jarvis Jensen Kagan Keller Kemp Kendall Kirby Knox Kramer Lang Larkin Lawson Lennox
Lowell Lund Mabry Maddox Marlow Mercer Mohr Morrow Nash Newell Norris Oakes Olsen Osborn Paxton Pereira Pike Porter
Pratt Quigley Quinn Radford Ramsey Reeve Rigby Rourke Sawyer Sexton Sharp Slater Sloane Stark Sutton Talbot Thorne
Tilden Tucker Upton Vance Vogel Wade Walsh Webber Weston Whitlock Yates York Zimmer
""".split()

PLACES = """
Alder Arden Barrow Beckett Belford Brackley Caldwell Camden Carlow Clifton Corwen Dalby Darley Denby Dunmore Eastleigh
Elmsford Fairford Fenwick Garvie Glenrock Hadley Harwich Hexham Ilford Kelso Kempsey Kilburn Kirkham Lambton Langley
Leyburn Lindale Malton Marsden Melrose Norby Oakham Orford Penrith Pickering Quorn Redcar Renfrew Ripley Selby Skipton
Stanhope Tarbert Thirsk Tiverton Ullapool Wareham Welford Whitby Wickham Winslow Witney Yarrow Yeovil
""".split()

VENUES = "market harbour mill fair school station brewery museum hospital library quarry vineyard".split()

ITEMS = """
apples pears plums cherries lemons onions carrots beans turnips radishes loaves cakes barrels baskets bottles candles
blankets buckets hammers nails ropes saddles kettles spoons plates lanterns mirrors pencils notebooks ribbons
""".split()

# The two parts of a passage's title.
TITLE_COLOURS = """
Amber Azure Black Bronze Copper Coral Crimson Emerald Golden Green Grey Indigo Ivory Jade Lilac Maroon Ochre Olive
Orange Pearl Pink Purple Ruby Russet Saffron Scarlet Silver Violet White Yellow
""".split()
TITLE_THINGS = """
Anchor Arrow Badger Beacon Bridge Castle Cedar Comet Crown Eagle Falcon Feather Forest Fountain Garden Gate Glacier
Heron Island Lantern Meadow Mountain Orchard Otter Palace Raven River Shield Sparrow Tower
""".split()

# Singular and plural of what is counted.
COUNTED = [
    (one, one + "s")
    for one in "boat cart letter goat guest parcel swan tram pilgrim crate horse balloon".split()
]  # fmt: skip

ADJECTIVES = """
bitter bold brave brief bright broken calm careful cheap clean clever cold cosy crooked curious damp dark dear deep
distant dry dull dusty faint fair famous fierce fine firm flat foreign frail fresh gentle gloomy grand grateful great
handsome happy harsh heavy hollow honest huge humble hungry jolly keen kind large lazy light little lively lonely long
loud lucky mild modest narrow neat noble noisy pale patient plain pleasant polite poor proud quick quiet rare rich
rough round rude rusty sad shallow shy silent simple slow small smooth soft steep stern strange strong sturdy tall
thin tidy tired tiny warm weary wet wide wild wise wooden young
""".split()

PEOPLE = """
baker barber blacksmith brother butcher captain carpenter clerk cobbler colonel cook cousin dancer daughter dentist
doctor driver farmer ferryman fisherman gardener general girl glazier governor grandfather guard guide hunter judge
lawyer lodger maid mason mayor mechanic merchant midwife miller miner minister musician nephew nurse painter pastor
pilot pianist plumber poet postman printer professor sailor scholar sculptor servant sheriff shepherd singer sister
soldier stranger student surgeon tailor teacher tinker trader traveller waiter watchman weaver widow
""".split()

VERBS = """
admired borrowed bought broke brought buried carried cleaned collected copied counted covered crossed described
discovered dragged dropped examined fetched finished followed forgot found gathered guarded hid ignored inspected kept
lifted locked lost measured mended moved needed noticed opened ordered packed painted passed polished praised pulled
pushed reached received remembered repaired returned saved sketched smelled sold sorted stole studied touched traded
visited washed watched weighed wrapped
""".split()

THINGS = """
bag barn basin bell bench bicycle boiler book boot bowl box brush bundle cabin cabinet cage canvas carpet chain chair
chest chimney clock cloak coat coin compass cottage crate cup curtain cushion desk diary dish door drawer drum fence
fiddle flag flute furnace gate glove hammock hat helmet hut jacket jar jewel jug key kite knife ladder lamp lock map
mask mattress medal mitten motor needle net painting paper pen photograph pillow pipe pot purse quilt rake ring robe
rug sack sail saw scarf sculpture shawl shed shelf shirt shoe shovel sled statue stool stove suitcase sword table
telescope tent ticket tool towel toy tray trumpet trunk vase violin wagon wallet wheel whistle window
""".split()

SPOTS = """
abbey alley avenue bakery bank bay beach bend border bridge camp canal castle cave cellar chapel church cliff coast
corner courtyard creek dam ditch dock farm ferry field forest fountain garden glade grove hall hedge hill hotel inn
island kitchen lake lane lighthouse marsh meadow monastery mountain orchard palace park pasture path pier pond port
ridge river road shop shore square stable stairs stream street swamp temple theatre tower town tunnel valley village
wall waterfall well wharf wood workshop yard
""".split()

ADVERBS = """
again alone already always badly barely calmly eagerly easily exactly finally gladly hardly hastily loudly mostly
nearly nervously often openly perhaps politely quickly quietly rarely sadly secretly seldom silently slowly softly
soon suddenly together usually
""".split()

TIMES = """
autumn breakfast dawn daybreak dinner dusk evening midday midnight morning night noon spring summer sunrise sunset
supper winter
""".split()

WEATHER = """
breeze cloud dew drizzle fog frost gale hail heat mist rain rainbow shower sleet smoke snow storm thunder wind
""".split()

SENTENCES = """
The {adj} {person} {verb} the {thing}.
The {person} {verb} a {adj} {thing} near the {spot}.
In the {time} the {person} {verb} the {thing} {adv}.
A {adj} {weather} came over the {spot}.
The {person} and the {person} {verb} the {adj} {thing}.
Nobody {verb} the {thing} behind the {spot}.
At {time} the {spot} was {adj} and {adj}.
The {spot} beyond the {spot} looked {adj} in the {weather}.
The {person} {adv} {verb} a {thing} and a {thing}.
Every {time} the {adj} {person} walked to the {spot}.
There was a {adj} {thing} under the {thing}.
The {thing} of the {person} was too {adj} for the {spot}.
After the {weather} the {person} {verb} the {spot} {adv}.
Some said that the {person} {adv} {verb} the {thing}.
The road to the {spot} was {adj} until {time}.
Before {time} a {person} {verb} the {thing} from the {spot}.
The {adj} {thing} stood between the {spot} and the {spot}.
With a {adj} {thing} the {person} {verb} the {thing}.
The {person} of the {spot} never {verb} a {thing}.
Because of the {weather} the {spot} stayed {adj}.
Only the {adj} {person} {verb} the {spot} at {time}.
The {person} told a {adj} story about the {spot}.
Two of them {verb} the {thing} while the {person} slept.
It was {adj} at the {spot} and the {person} was {adj}.
The {weather} {adv} reached the {adj} {spot}.
A letter about the {thing} lay in the {spot}.
The {person} wanted the {adj} {thing} more than the {thing}.
By {time} the {person} had left the {adj} {spot}.
Inside the {thing} was a {adj} {thing}.
The {person} asked the {person} about the {spot}.
Later the {person} sat by the {spot} with a {thing}.
Once a {adj} {person} lived near the {adj} {spot}.
""".strip().splitlines()
