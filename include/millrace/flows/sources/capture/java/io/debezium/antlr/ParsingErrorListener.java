package io.debezium.antlr;

import io.debezium.DebeziumException;
import io.debezium.text.ParsingException;
import io.debezium.text.Position;
import java.util.ArrayList;
import java.util.Collection;
import java.util.function.BiFunction;
import millrace.CaptureEngine;
import org.antlr.v4.runtime.BaseErrorListener;
import org.antlr.v4.runtime.RecognitionException;
import org.antlr.v4.runtime.Recognizer;

/**
 * Ends the engine for a statement that Debezium's parser does not know, if it may be about a captured table. Others are
 * skipped.
 *
 * <p>Takes the place of Debezium's class of this name, which leaves the choice between all and none.
 */
public class ParsingErrorListener extends BaseErrorListener {
    private final Collection<ParsingException> errors = new ArrayList<>();
    private final BiFunction<ParsingException, Collection<ParsingException>, Collection<ParsingException>> accumulate;
    private final String statement;

    public ParsingErrorListener(
        String statement, BiFunction<ParsingException, Collection<ParsingException>, Collection<ParsingException>> accumulate
    ) {
        this.statement = statement;
        this.accumulate = accumulate;
    }

    @Override
    public void syntaxError(Recognizer<?, ?> recognizer, Object symbol, int line, int column, String message, RecognitionException error) {
        String words = "the engine's parser does not know a statement: " + statement + "; it stops at: "
            + message.substring(Math.max(0, message.length() - 100));
        if (CaptureEngine.isCaptured(statement)) {
            throw new DebeziumException(words);
        }
        accumulate.apply(new ParsingException(new Position(0, line, column), words, error), errors);
    }

    public Collection<ParsingException> getErrors() {
        return errors;
    }
}
