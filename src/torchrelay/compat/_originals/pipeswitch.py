from torchrelay.compat import replace

replace(__name__)
