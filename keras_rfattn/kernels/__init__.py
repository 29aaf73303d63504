"""The kernels that feature maps estimate (`values`), and the estimators' variance."""
