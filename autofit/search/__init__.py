"""Searching: which Config to measure next, what a measurement proves about others, and which one to recommend.

This room knows optuna and never torch. The tuning room hands it functions (`SearchProblem`, `KnobChoices`), so that a
whole search runs in a test against a formula.
"""

from autofit.search.concurrency import Concurrency, Probe, Threaded
from autofit.search.enumeration import Count, Enumeration
from autofit.search.journal import Journal, begun_with
from autofit.search.pareto import Evidence, Outlook, outlook
from autofit.search.predictions import Predictions
from autofit.search.prior_measurements import PriorMeasurement, prior_measurement
from autofit.search.ranking import Figures, best_of_tiers, fastest, finalists, nearest_miss, preferred, recommend
from autofit.search.space import KnobChoices, Space, list_spaces, load_space
from autofit.search.study import Limits, SearchOutcome, SearchProblem, search
from autofit.search.verification import Verification, verify

__all__ = [
    "search",
    "SearchProblem",
    "Limits",
    "Probe",
    "Concurrency",
    "Threaded",
    "Journal",
    "begun_with",
    "PriorMeasurement",
    "prior_measurement",
    "SearchOutcome",
    "Space",
    "KnobChoices",
    "load_space",
    "list_spaces",
    "Count",
    "Enumeration",
    "fastest",
    "Figures",
    "preferred",
    "recommend",
    "finalists",
    "Verification",
    "verify",
    "best_of_tiers",
    "nearest_miss",
    "Predictions",
    "Evidence",
    "Outlook",
    "outlook",
]
