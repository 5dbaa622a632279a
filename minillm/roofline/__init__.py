"""The instrument: counts FLOPs and bytes, measures ceilings, predicts, and places a stage on the roofline."""
