"""A small retrieval set: passages of ten topics, and questions of which one passage is the answer."""

from __future__ import annotations

PASSAGES = [
    # Baking
    "Bread rises because yeast eats the sugar in the dough and gives off carbon dioxide, which the gluten traps.",
    "To keep a cake from sticking, butter the tin, dust it with flour, and let the cake cool before turning it out.",
    "Sourdough starter is a mix of flour and water in which wild yeast and bacteria live; it must be fed every day.",
    "Puff pastry gets its layers from cold butter that is folded into the dough again and again.",
    # Astronomy
    "A solar eclipse happens when the Moon passes between the Sun and the Earth and its shadow falls on us.",
    "The rings of Saturn consist of countless pieces of ice and rock, most of them no larger than a house.",
    "A black hole is a region where gravity is so strong that not even light can escape from it.",
    "Mars looks red because the iron in its soil has rusted.",
    # Bicycles
    "A squeaking bicycle chain needs to be cleaned and then oiled link by link.",
    "Disc brakes stop a bike reliably in the rain, because water does not reach the rotor as it does a wet rim.",
    "To mend a puncture, find the hole under water, roughen the tube, spread rubber cement and press a patch on it.",
    "The saddle is at the right height when the leg is almost straight at the lowest point of the pedal stroke.",
    # Personal finance
    "Compound interest means that interest is paid on earlier interest too, so that savings grow faster every year.",
    "An emergency fund should cover the costs of living for three to six months.",
    "A fixed-rate mortgage keeps the monthly payment the same, even if interest rates go up.",
    "Spreading investments over many companies and countries lowers the risk of losing everything.",
    # Medicine
    "Antibiotics kill bacteria, but they do nothing against viruses such as those that cause the flu.",
    "A vaccine shows the immune system a harmless part of a germ, so that it knows how to fight the real one.",
    "High blood pressure often has no symptoms, but over the years it damages the heart and the kidneys.",
    "People with diabetes have too much sugar in their blood, because insulin is missing or does not work.",
    # Computing
    "A hash table finds a value by computing the place of its key, which takes the same time however many there are.",
    "Version control keeps the history of source code, so that several people can work on it and undo mistakes.",
    "A deadlock is when two threads each wait for a lock that the other one holds, and neither can go on.",
    "Encryption with a public key lets anyone write a secret message that only the owner of the private key can read.",
    # History
    "The printing press of Johannes Gutenberg made books cheap in the fifteenth century and spread new ideas.",
    "The Roman Empire built roads of stone so that its legions could march quickly to every province.",
    "The Berlin Wall fell in November 1989, and Germany was united in the following year.",
    "The ancient Egyptians preserved the bodies of their kings as mummies and buried them in pyramids.",
    # Gardening
    "Tomatoes need six hours of sun a day, a stake to climb, and water at the roots rather than on the leaves.",
    "Compost is made of kitchen scraps and dry leaves, which worms and microbes turn into rich soil.",
    "Roses are pruned at the end of winter, just above a bud that looks outwards.",
    "Slugs come out at night to eat lettuce; copper tape and beer traps keep them away.",
    # Animals
    "Honeybees tell each other where flowers are by dancing in the hive.",
    "Bats find their way in the dark by listening to the echo of their own calls.",
    "Emperor penguins keep their eggs warm on their feet through the Antarctic winter.",
    "An octopus changes the colour of its skin within a second to hide from its enemies.",
    # Travel
    "Jet lag is milder if one gets daylight in the morning and goes to bed at the local time.",
    "Travellers from most countries need a passport that is valid for six more months to enter Thailand.",
    "The high-speed train from Paris to Lyon takes about two hours.",
    "Hikers should carry water, a map, warm clothes and a whistle into the mountains.",
]

QUERIES = [
    ("why does dough get bigger?", 0),
    ("how do I get flaky layers in pastry?", 3),
    ("what makes the red planet red?", 7),
    ("what happens when the moon covers the sun?", 4),
    ("fixing a flat tyre", 10),
    ("my bike makes a squeaky noise when I pedal", 8),
    ("how much money should I put aside in case I lose my job?", 13),
    ("earning interest on interest", 12),
    ("should I take antibiotics when I have the flu?", 16),
    ("how do vaccines protect us?", 17),
    ("two threads that wait for each other forever", 22),
    ("sending a message that only one person can decrypt", 23),
    ("when was Germany reunified?", 26),
    ("who invented book printing?", 24),
    ("how to stop slugs from eating my salad", 31),
    ("turning kitchen waste into soil", 29),
    ("how do bees communicate?", 32),
    ("animals that navigate by sound", 33),
    ("sleeping badly after a long flight", 36),
    ("how long is the train ride from Paris to Lyon?", 38),
]
"""Each question, and the place of the passage that answers it."""
