"""Who verifies: engines that hold the policy's weights and decode."""
