"""Does this model smooth, and which sub-block does it? Weights, measurement and theory in a few lines."""

import sys

import oversmooth as osm
from oversmooth.models.open import minilm_folder

target = sys.argv[1] if len(sys.argv) > 1 else minilm_folder()
analysis = osm.analyze(target, max_samples=4, what_ifs=(), solve=1)
print(analysis.inspection)
print(analysis.measurement)
print(analysis.prediction)
