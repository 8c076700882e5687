"""Pure functions over packed batches: rewards, KL, estimators, normalisation. No Redis in here."""
