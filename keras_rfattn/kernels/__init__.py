"""The closed-form variance of estimators of the softmax kernel."""
