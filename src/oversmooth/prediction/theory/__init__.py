"""The theorems: numbers and operators in, verdicts out. Nothing here sees an `nn.Module`."""
