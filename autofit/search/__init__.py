"""Searching: which Config to measure next, what a measurement proves about others, and which one to recommend.

This room knows optuna and never torch. It is handed functions by tune (`Seams`, `Offer`), so that a whole search runs
in a test against a formula.
"""

from autofit.search.beliefs import Beliefs
from autofit.search.choose import Figures, best_of_tiers, fastest, finalists, nearest_miss, pick, preferred
from autofit.search.crew import Alone, Crew, Probe, Threads
from autofit.search.dominance import rules_out
from autofit.search.effects import Effects, Features
from autofit.search.enumeration import Count, Enumeration
from autofit.search.expectation import Expectation
from autofit.search.finals import Finals, play, play_tiers
from autofit.search.foresight import Evidence
from autofit.search.journal import Journal, begun_with
from autofit.search.known import Known, known_from
from autofit.search.outlook import Outlook, outlook
from autofit.search.sampler import EffectsSampler
from autofit.search.space import Offer, Space, SpaceFile, list_spaces, load_space
from autofit.search.study import Limits, Seams, SearchOutcome, search

__all__ = [
    "search",
    "Seams",
    "Limits",
    "Probe",
    "Crew",
    "Alone",
    "Threads",
    "Journal",
    "begun_with",
    "Known",
    "known_from",
    "SearchOutcome",
    "Space",
    "SpaceFile",
    "Offer",
    "load_space",
    "list_spaces",
    "Count",
    "Enumeration",
    "fastest",
    "Figures",
    "preferred",
    "pick",
    "finalists",
    "Finals",
    "play",
    "play_tiers",
    "best_of_tiers",
    "nearest_miss",
    "EffectsSampler",
    "Beliefs",
    "Expectation",
    "Evidence",
    "Outlook",
    "outlook",
    "Effects",
    "Features",
    "rules_out",
]
