"""Attribution: what patching each node would do to a logit difference, estimated from a few backward passes."""
