"""Does this model smooth, and which sub-block does it? Weights, measurement and theory in a few lines."""

import sys

import oversmooth as osm

target = sys.argv[1] if len(sys.argv) > 1 else osm.example_model()
analysis = osm.analyze(target, max_samples=4, what_ifs=(), solve=1)
print(analysis.inspection)
print(analysis.measurement)
print(analysis.prediction)
