"""The calibration artifact on disk: what it holds, how it is read and which checkpoint it was made for."""
