"""Searching: which Config to measure next, what a measurement proves about others, and which one to
recommend.

This room knows optuna and never torch. The tuning room hands it functions (`SearchProblem`,
`KnobChoices`), so that a whole search runs in a test against a formula.
"""
