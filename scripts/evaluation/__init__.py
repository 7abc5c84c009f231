"""The evaluation (DisCo, section 6): one training step against every baseline, in one run."""
