"""The one web application for people and programs: who comes in, what each call needs, its routes; served alone or inside Airflow."""
