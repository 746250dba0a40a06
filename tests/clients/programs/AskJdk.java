import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.time.Duration;
import java.util.regex.Matcher;
import java.util.regex.Pattern;

/**
 * The JDK's own client as Spring AI and LangChain4j make it, with the offer of HTTP/2 that it begins with: a tool over two
 * turns, whole and streamed, with bodies of a known length and in chunks. Prints one finding a line.
 */
public class AskJdk {
  static final HttpClient CLIENT = HttpClient.newHttpClient();
  static final String TOOLS =
      "\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"weather\",\"parameters\":{\"type\":\"object\"}}}]";
  static final String USER = "{\"role\":\"user\",\"content\":\"Rain?\"}";

  static String post(String messages, boolean stream, boolean inChunks) throws Exception {
    String body = "{\"model\":\"tiny\",\"stream\":" + stream + "," + TOOLS + ",\"messages\":[" + messages + "]}";
    HttpRequest.BodyPublisher whole = HttpRequest.BodyPublishers.ofString(body);
    HttpRequest request =
        HttpRequest.newBuilder(URI.create(System.getenv("BASE_URL") + "/v1/chat/completions"))
            .header("Content-Type", "application/json")
            .timeout(Duration.ofSeconds(60))
            .POST(inChunks ? HttpRequest.BodyPublishers.fromPublisher(whole) : whole)
            .build();
    HttpResponse<String> answered = CLIENT.send(request, HttpResponse.BodyHandlers.ofString());
    if (answered.statusCode() != 200) {
      throw new IllegalStateException(answered.statusCode() + " " + answered.body());
    }
    return answered.body();
  }

  static String found(String pattern, String text) {
    Matcher matcher = Pattern.compile(pattern).matcher(text);
    if (!matcher.find()) {
      throw new IllegalStateException(pattern + " is not in " + text);
    }
    return matcher.group(1);
  }

  public static void main(String[] arguments) throws Exception {
    for (boolean inChunks : new boolean[] {false, true}) {
      String called = post(USER, false, inChunks);
      String id = found("\"tool_calls\":\\[\\{\"id\":\"(\\w+)\"", called);
      String written = found("\"arguments\":\"((?:[^\"\\\\]|\\\\.)*)\"", called);
      String call =
          "{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[{\"id\":\"" + id
              + "\",\"type\":\"function\",\"function\":{\"name\":\"weather\",\"arguments\":\"" + written + "\"}}]}";
      String result = "{\"role\":\"tool\",\"tool_call_id\":\"" + id + "\",\"content\":\"wet\"}";
      String turns = USER + "," + call + "," + result;
      System.out.println(found("\"content\":\"([^\"]*)\"", post(turns, false, inChunks)));
      StringBuilder text = new StringBuilder();
      Matcher pieces = Pattern.compile("\"content\":\"([^\"]*)\"").matcher(post(turns, true, inChunks));
      while (pieces.find()) {
        text.append(pieces.group(1));
      }
      System.out.println(text);
    }
    HttpRequest models = HttpRequest.newBuilder(URI.create(System.getenv("BASE_URL") + "/v1/models")).build();
    System.out.println(CLIENT.send(models, HttpResponse.BodyHandlers.ofString()).statusCode());
  }
}
