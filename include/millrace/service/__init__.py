"""The web application for people and programs: authentication, permissions and routes.

Served alone or inside Airflow.
"""
