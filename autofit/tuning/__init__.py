"""One search from start to end: joins the search, the estimator and the probes, and keeps what was
measured."""
