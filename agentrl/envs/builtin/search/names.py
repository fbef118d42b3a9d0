"""The words the synthetic world is named from.

Kept apart from the world because the demo tokenizer needs the same lists: every word here is one token.
Surnames, place words and company words are built from a beginning and an ending; the lists share no word.
"""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _join(beginnings: str, endings: str) -> tuple[str, ...]:
    return tuple(b + e for b in beginnings.split() for e in endings.split())


FIRST_NAMES = _words(
    """
    Ada Adam Agnes Aisha Alan Alba Albert Alice Alma Amara Amir Ana Anders Andrea Anna Anton Ara Arthur Astrid
    August Basil Beata Ben Bianca Boris Bruno Carla Carmen Cecil Celia Chen Clara Claude Cora Cyril Dana Daniel
    Daphne Darius David Della Diego Dina Dora Edgar Edith Edwin Elena Elias Ella Elsa Emil Emma Enzo Erik Esther
    Eva Ezra Farid Fatima Felix Fiona Flora Frank Freya Gaston George Gina Grace Greta Guido Gustav Hana Hanna
    Harold Hassan Hector Helen Henry Hilda Hugo Ida Igor Ines Ingrid Irene Iris Isaac Ivan Ivy Jacob Jade James
    Jana Jasper Joan Joel Jonas Joy Judith Julia Kai Karin Karl Katya Keiko Klara Kurt Lars Laura Lea Lena Leo
    Lila Lin Louis Lucia Luka Lydia Mabel Magnus Maja Malik Marco Maria Mark Marta Martin Mateo Maud Max Mei Mila
    Milo Mina Miriam Mona Nadia Naomi Nell Nico Nina Noah Nora Olga Oliver Omar Oscar Otis Otto Pablo Paula Pearl
    Pedro Petra Philip Priya Quinn Rafael Raj Ralph Rebecca Reza Rhea Rita Robin Roman Rosa Ruben Ruth Salma Sam
    Sara Selma Serge Silas Simon Sofia Stella Stig Sven Sylvia Tara Tariq Tessa Theo Thomas Tilda Tobias Uma Ursula
    Vera Victor Viola Walter Wanda Wilma Xenia Yara Yusuf Yves Zara Zeno Zoe"""
)

SURNAMES = _join(
    "Ash Black Bram Carl Dal Elder Fair Gold Hart Holl Kin Lang Marsh Nor Pem Raven Stan Thorn Wake Yar",
    "well man son wick ridge stone more field worth croft by gate ley strom berg hurst",
)
PLACE_WORDS = _join(
    "Amber Brack Corm Dun Eddle Fern Glen Hazel Inver Kel Loch Mill Net Orm Pine Rye Sel Tarn Ulv Wex",
    "ford bury mouth haven dale port minster bridge",
)
PLACE_KINDS = _words(
    "Port New Old Upper Lower East West South Saint Fort Mount Lake Great Little Royal Long High Low Far Castle"
)
COMPANY_WORDS = _join(
    "Astro Blue Cloud Delta Echo Flint Globe Helio Iron Jet Lumen Meta Nova Omni Pulse Quant Star Terra Ultra Vect",
    "wave line core works cast flow grid link mark point",
)
COMPANY_KINDS = _words(
    "Labs Foods Motors Systems Textiles Airways Energy Press Mining Shipping Optics Robotics Glass Paper Steel "
    "Pharma Studios Bank Tools Media"
)

WORLD_WORDS: tuple[str, ...] = (
    *FIRST_NAMES,
    *SURNAMES,
    *PLACE_KINDS,
    *PLACE_WORDS,
    *COMPANY_WORDS,
    *COMPANY_KINDS,
)
"""Every word that occurs in a name of the world, each once."""
